"""Hosts in a box: network namespaces that pass for machines, each with an address, sshd, a home and its own processes.

    root namespace   bridge, .254 ── veth ── h1 (.1)    each host: own network, process ids, mounts: /tmp/ray, /dev/shm, /run,
                                  ├─ veth ── h2 (.2)    home, /etc/hosts. The rest of the file system is shared, and with it
                                  └─ veth ── h3 (.3)    the virtual environment.

Everything is ended by what it is: a host by its first process, which takes the others of its process namespace along; links and
namespaces by their names, which carry a random part.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VENV_BIN = Path(sys.executable).parent
_TOOLS = ("ip", "tc", "unshare", "sshd", "ssh", "ssh-keygen", "rsync")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Host:
    """One machine."""

    name: str
    namespace: str
    address: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def home(self) -> Path:
        """Root's home on this host."""
        return self.folder / "home"

    def slow(self, rate: str) -> None:
        """Limit its link, both ways, for example to ``200mbit``."""
        limit = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", "e0", *limit)
        _run("tc", "qdisc", "replace", "dev", self.outer, *limit)

    @property
    def outer(self) -> str:
        """The end of its link that is not on it."""
        return f"v{self.namespace[2:]}"

    def cut(self) -> None:
        """Take its link away."""
        _run("ip", "link", "set", self.outer, "down")

    def mend(self) -> None:
        """Give its link back."""
        _run("ip", "link", "set", self.outer, "up")

    def end(self) -> None:
        """The machine is switched off."""
        if self.process is not None:
            self.process.kill()  # unshare takes the first process of the namespace along, and that all others
            self.process.wait()


@dataclass
class Box:
    """Some hosts on one bridge, and the key that opens them."""

    hosts: list[Host]
    folder: Path
    key: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def ssh(self, host: Host, command: str) -> list[str]:
        """The command line that runs something on a host, as a person would from outside."""
        options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectTimeout=10"]
        flags = [part for option in options for part in ("-o", option)]
        line = f"source ~/.bashrc; {command}"
        return ["ssh", "-i", str(self.key), *flags, f"root@{host.address}", f"bash --login -c {shlex.quote(line)}"]

    def run(self, host: Host, command: str, timeout_s: float = 120) -> str:
        """Output of a command on a host, which must succeed."""
        done = subprocess.run(self.ssh(host, command), capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def start(self, host: Host, command: str, log: Path) -> subprocess.Popen[bytes]:
        """A command that goes on, on a host; it ends with its ssh session, or with the box."""
        with log.open("wb") as out:
            line = self.ssh(host, command)
            process = subprocess.Popen([*line[:1], "-tt", *line[1:]], stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self.started.append(process)
        return process

    def environment(self) -> dict[str, str]:
        """Of commands that run outside the hosts, with a home of their own."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return {**clean, "HOME": str(self.folder / "launcher"), "PATH": f"{VENV_BIN}:{clean['PATH']}", "PYTHONPATH": str(ROOT)}

    def launch(self, *command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command outside the hosts, with a private /tmp/ray."""
        private = f"mount --bind {self.folder}/launcher/ray /tmp/ray && exec {shlex.join(command)}"
        line = ["unshare", "--mount", "bash", "-c", private]
        return subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, env=self.environment())


def need_hosts() -> None:
    """Skips the test where hosts cannot be made, and says what is missing."""
    if os.geteuid() != 0:
        pytest.skip("hosts in a box need root")
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:{_PATH}") is None]
    if missing:
        pytest.skip(f"hosts in a box need {', '.join(missing)} (apt-get install iproute2 openssh-server rsync)")
    probe = f"swprobe{secrets.token_hex(2)}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode != 0:
        pytest.skip("hosts in a box need network namespaces, which this machine does not let us make")
    _run("ip", "netns", "del", probe)


@contextmanager
def box(num_hosts: int) -> Iterator[Box]:
    """Hosts for the length of a block."""
    mark, folder = secrets.token_hex(2), Path(tempfile.mkdtemp(prefix="sw-box-"))
    subnet = f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(250)}"
    hosts = [Host(f"h{at}", f"sw{mark}h{at}", f"{subnet}.{at}", folder / f"h{at}") for at in range(1, num_hosts + 1)]
    bridge, made = f"br{mark}", Box(hosts, folder, folder / "key")
    Path("/tmp/ray").mkdir(exist_ok=True)
    try:
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(made.key))
        for name in ("launcher/.ssh", "launcher/ray"):
            (folder / name).mkdir(parents=True)
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{subnet}.254/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for host in hosts:
            _connect(host, bridge)
            _prepare(host, hosts, made.key)
            _boot(host)
        for host in hosts:
            _wait_for_ssh(made, host)
        yield made
    finally:
        for process in made.started:
            process.kill()
            process.wait()
        for host in hosts:
            host.end()
            _try("ip", "link", "del", host.outer)
            _try("ip", "netns", "del", host.namespace)
        _try("ip", "link", "del", bridge)
        shutil.rmtree(folder, ignore_errors=True)


def _connect(host: Host, bridge: str) -> None:
    _run("ip", "netns", "add", host.namespace)
    _run("ip", "link", "add", host.outer, "type", "veth", "peer", "name", "e0", "netns", host.namespace)
    _run("ip", "link", "set", host.outer, "master", bridge, "up")
    _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "e0")
    for device in ("lo", "e0"):
        _run("ip", "-n", host.namespace, "link", "set", device, "up")


def _prepare(host: Host, hosts: Sequence[Host], key: Path) -> None:
    """The files that differ on it."""
    for name in ("home/.ssh", "ray", "etc"):
        (host.folder / name).mkdir(parents=True)
    etc = host.folder / "etc"
    names = "".join(f"{each.address} {each.name}\n" for each in hosts)
    (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    (etc / "resolv.conf").write_text("")
    others = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
    (etc / "passwd").write_text("\n".join([f"root:x:0:0:root:{host.home}:/bin/bash", *others]) + "\n")
    (etc / "shadow").write_text("root:*:19000:0:99999:7:::\nsshd:*:19000:0:99999:7:::\n")
    shutil.copy(f"{key}.pub", host.home / ".ssh" / "authorized_keys")
    path = f"{VENV_BIN}:{_PATH}"
    lines = [f"export PATH={path}", f"export PYTHONPATH={ROOT}", "export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1"]
    (host.home / ".bashrc").write_text("\n".join(lines) + "\n")
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(etc / "host_key"))
    (etc / "sshd_config").write_text(
        f"Port 22\nListenAddress {host.address}\nHostKey {etc}/host_key\nAuthorizedKeysFile {host.home}/.ssh/authorized_keys\n"
        "StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\nPidFile none\nPrintMotd no\n"
        "Subsystem sftp internal-sftp\nMaxSessions 50\nMaxStartups 50\n"
    )


def _boot(host: Host) -> None:
    etc = host.folder / "etc"
    steps = [
        "mount --make-rprivate /",
        f"mount --bind {host.folder}/ray /tmp/ray",
        "mount -t tmpfs tmpfs /dev/shm",
        "mount -t tmpfs tmpfs /run && mkdir /run/sshd",
        *(f"mount --bind {etc}/{name} /etc/{name}" for name in ("hosts", "resolv.conf", "passwd", "shadow")),
        f"hostname {host.name}",
        f"cd {host.home}",
        f"exec env -i PATH={_PATH} HOME={host.home} {shutil.which('sshd', path=_PATH)} -D -e -f {etc}/sshd_config",
    ]
    spaces = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--uts", "--ipc"]
    line = ["ip", "netns", "exec", host.namespace, *spaces, "bash", "-c", " && ".join(steps)]
    with (host.folder / "log").open("wb") as log:
        host.process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _wait_for_ssh(made: Box, host: Host, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if subprocess.run(made.ssh(host, "true"), capture_output=True).returncode == 0:
            return
        time.sleep(0.2)
    raise AssertionError(f"no ssh on {host.name}: {(host.folder / 'log').read_text()[-2000:]}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"


def _try(*command: str) -> None:
    with suppress(Exception):
        _run(*command)
