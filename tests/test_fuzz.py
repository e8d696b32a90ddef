"""scripts/fuzz: mutated packs are refused in one line or do no harm."""

import sys

from tests.launch import ROOT, run


def test_mutated_packs_do_no_harm(tmp_path):
    done = run([sys.executable, str(ROOT / "scripts/fuzz"), "--packs", "600"], 110, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "600 mutated packs:" in done.stdout and done.stdout.endswith("0 wrong\n")
