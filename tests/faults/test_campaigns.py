"""Each campaign at reduced size; `make test-faults` runs them whole.

Owns: that every campaign runs, and misses none of its bounds.
Does not own: the campaigns (campaign/).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
MODULES = {file.stem for file in (FOLDER / "campaign").glob("[a-z]*.py")}
CAMPAIGNS = sorted(MODULES - {"children", "mounts", "outcome", "subject"})
NEED_ROOT = {"full_disk", "opening_faults"}


@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_a_campaign_at_reduced_size(campaign):
    if campaign in NEED_ROOT and os.geteuid() != 0:
        pytest.skip("mounting, and giving files to others, needs root")
    root = FOLDER.parents[1]
    path = os.pathsep.join(map(str, (FOLDER, root, root / "tools")))
    ran = subprocess.run(
        [sys.executable, "-m", "campaign", "--small", "--json", "--only", campaign],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    outcome = json.loads(ran.stdout)
    assert outcome["cases"] > 0
    assert outcome["wrong"] == outcome["deaths"] == 0
    assert outcome["failures"] == []
