from __future__ import annotations

from pathlib import Path

import pytest

from placement.nodes.hardware import cpu_has_bfloat16


@pytest.mark.parametrize(
    ("facts", "has"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse avx2 fma\n", False),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512bw avx512vl\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("processor\t: 0\n", True),
    ],
)
def test_bfloat16_of_a_cpu_is_read_from_its_flags(tmp_path: Path, facts: str, has: bool) -> None:
    (tmp_path / "cpuinfo").write_text(facts)
    assert cpu_has_bfloat16(tmp_path / "cpuinfo") is has


def test_a_system_that_does_not_say_is_trusted(tmp_path: Path) -> None:
    assert cpu_has_bfloat16(tmp_path / "none")
