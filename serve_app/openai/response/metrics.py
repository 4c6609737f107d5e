"""Prometheus metrics of the endpoint, in a registry of their own."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve_app.openai.response.delta import Delta
from serve_app.openai.response.response_builder import Job

CLIENT_GONE = 499
"""Status of requests whose client disconnected; no answer with this status is sent."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """Counters and histograms of the endpoint. `begin` returns the observer of one request."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        by_endpoint = ("endpoint",)
        self.requests = Counter("shardwright_requests", "Requests by HTTP status", ("endpoint", "status"), registry=registry)
        self.choices = Counter(
            "shardwright_choices", "Finished choices by reason", ("endpoint", "finish_reason"), registry=registry
        )
        self.running = Gauge("shardwright_requests_running", "Requests being answered", by_endpoint, registry=registry)
        self.prompt_tokens = Counter("shardwright_prompt_tokens", "Prompt tokens", registry=registry)
        self.cached_tokens = Counter(
            "shardwright_cached_prompt_tokens", "Prompt tokens found in the prefix cache, as told in usage", registry=registry
        )
        self.generated_tokens = Counter("shardwright_generated_tokens", "Generated tokens", registry=registry)
        self.first_token = self._histogram("time_to_first_token", "Arrival to first token of a choice")
        self.next_token = self._histogram("time_per_output_token", "Between tokens of a choice")
        self.whole = self._histogram("request", "Arrival to end of the answer")

    def begin(self, endpoint: str) -> Observation:
        """Start to observe a request that arrives now at `endpoint` (``completions`` or ``chat``), and count it as running.
        Returns the observation, which must be closed."""
        return Observation(self, endpoint)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"shardwright_{name}_seconds", text, ("endpoint",), registry=self.registry, buckets=_SECONDS
        )  # fmt: skip


class Observation:
    """The measurements of one request, from arrival to `close`."""

    def __init__(self, metrics: Metrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._began = time.monotonic()
        self._latest: dict[int, float] = {}
        self._open = True
        metrics.running.labels(endpoint).inc()

    def accepted(self, job: Job) -> None:
        """Count the tokens of the job's prompts, each prompt once. To be called once, when the backend has accepted the job."""
        self._metrics.prompt_tokens.inc(sum(len(choice.prompt.ids) for choice in job.choices if choice.first))

    def delta(self, delta: Delta, newly_cached: int = 0) -> None:
        """Count the tokens of a delta that arrives now, and observe the time to the first token (TTFT) or the time per output
        token (TPOT), in seconds; count the choice if the delta finishes it.

        `newly_cached` is the number of tokens by which the delta raises the cached tokens of the answer's `Usage`.
        """
        metrics, now = self._metrics, time.monotonic()
        metrics.cached_tokens.inc(newly_cached)
        if delta.generated:
            metrics.generated_tokens.inc(delta.generated)
            since = self._latest.get(delta.index)
            if since is None:
                metrics.first_token.labels(self._endpoint).observe(now - self._began)
            else:
                for _ in range(delta.generated):
                    metrics.next_token.labels(self._endpoint).observe((now - since) / delta.generated)
            self._latest[delta.index] = now
        if delta.finish:
            metrics.choices.labels(self._endpoint, delta.finish).inc()

    def close(self, status: int) -> None:
        """Mark the request as ended with the HTTP `status`: it counts as running no longer, and its duration is observed. Only
        the first call counts."""
        if not self._open:
            return
        self._open = False
        self._metrics.running.labels(self._endpoint).dec()
        self._metrics.requests.labels(self._endpoint, str(status)).inc()
        self._metrics.whole.labels(self._endpoint).observe(time.monotonic() - self._began)


def exposition(metrics: Metrics, stats: Mapping[str, Mapping[str, float]], whole: Mapping[str, float]) -> bytes:
    """Returns all metrics as Prometheus text: those of the endpoint, the gauges of the engines (`stats`, by replica name, then
    by gauge name), and those of the whole service (`whole`, by name).

    A gauge of an engine named ``name:label=value`` gets that label as well.
    """
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    for name, value in whole.items():
        Gauge(f"shardwright_{name}", "As reported by the service", registry=registry).set(value)
    for replica, values in stats.items():
        for name, value in values.items():
            name, _, label = name.partition(":")
            key, _, of = label.partition("=")
            name, labels = "shardwright_engine_" + re.sub(r"\W", "_", name), {"replica": replica} | ({key: of} if key else {})
            if name not in gauges:
                gauges[name] = Gauge(name, "As reported by the engine", tuple(labels), registry=registry)
            gauges[name].labels(**labels).set(value)
    return generate_latest(metrics.registry) + generate_latest(registry)
