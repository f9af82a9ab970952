"""The GPU tests run here as far as they can: on CPU tensors in the device's place.

Owns: that each of them is collected, and that none fails for a mistake of its own. Does not own:
what they prove, which takes a GPU.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Durations on a device cannot be rehearsed: of this one only the collection is.
NOT_REHEARSED = "test_encoder_on_device"


def rehearse():
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "--deselect", f"tests/gpu/{NOT_REHEARSED}.py", "tests/gpu"],
        cwd=ROOT,
        env={**os.environ, "TIERED_MMCACHE_REHEARSE_GPU": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_every_gpu_test_passes_in_rehearsal():
    ended = rehearse()
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]
    counts = re.search(r"(\d+) passed, \d+ deselected in ", ended.stdout)
    assert counts is not None, ended.stdout[-1000:]  # none failed, none was skipped
    modules = set(re.findall(r"tests/gpu/(test_\w+)\.py", ended.stdout))
    all_modules = {file.stem for file in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert modules == all_modules - {NOT_REHEARSED}


def test_without_a_gpu_they_fail_instead_of_passing():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    one = "tests/gpu/test_page_locked_memory.py::test_a_segment_is_locked_and_unlocked"
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", one],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 1
    assert "these tests need an accelerator" in ended.stdout
