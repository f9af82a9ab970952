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
CAMPAIGNS = sorted(
    file.stem for file in (FOLDER / "campaign").glob("*.py") if "\ndef run(" in file.read_text()
)


@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_a_campaign_at_reduced_size(campaign):
    root = FOLDER.parents[1]
    path = os.pathsep.join(map(str, (FOLDER, root, root / "tools")))
    ran = subprocess.run(
        [sys.executable, "-m", "campaign", "--small", "--json", "--only", campaign],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout, ran.stderr
    outcome = json.loads(ran.stdout)
    assert outcome["missed"] == [], ran.stderr
    assert outcome["wrong"] == outcome["deaths"] == 0
    if outcome["not_run"]:  # without root, or in a container that may not mount
        pytest.skip(f"{outcome['cases']} cases passed; not tried: " + "; ".join(outcome["not_run"]))
    assert ran.returncode == 0
    assert outcome["cases"] > 0
    assert outcome["failures"] == []
