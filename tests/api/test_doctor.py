"""`python -m te_patches doctor`: every finding with its state, and the remedy for what is missing."""

from __future__ import annotations

import json
import subprocess
import sys

import process
import te_patches
from te_patches import _doctor, _releases

ENABLE = "import te_patches.cpu, te_patches.__main__ as m; te_patches.cpu.enable(); m.main(['doctor', '--json'])"


def doctor(code: str, **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    variables = {**process.environment(), **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
    return done.returncode, {row["what"]: row for row in json.loads(done.stdout)}


def test_cpu_everything_needed_is_found(tmp_path):
    code, found = doctor(ENABLE, TE_PATCHES_CACHE=str(tmp_path))
    assert code == 0
    assert found["torch"]["state"] == "ok"
    assert "compiles for sm_80, sm_90" in found["NVRTC"]["found"]
    # Before 12.8, NVRTC lacks the two newer ones.
    assert ("sm_100, sm_120" in found["NVRTC"]["found"]) == (found["NVRTC"]["state"] == "ok")
    assert found["kernel cache"]["found"] == f"{tmp_path}, 0 kernels"
    assert found["FusedAdam.step"]["found"].startswith("patched")
    assert "multi_tensor_applier" in found


def test_cpu_what_is_missing_comes_with_its_remedy(tmp_path):
    words = "import te_patches.__main__ as m; m.main(['doctor', '--json'])"
    code, found = doctor(words, PYTHONPATH="", TE_PATCHES="nativ", TE_PATCHES_CACHE=str(tmp_path / "file" / "below"))
    assert code == 1
    assert found["Transformer Engine"]["state"] == "missing"
    assert "pip install" in found["Transformer Engine"]["remedy"]
    assert found["TE_PATCHES"]["state"] == "missing"
    assert "accepted: auto, native, te" in found["TE_PATCHES"]["found"]


def test_cpu_a_transformer_engine_without_its_compiled_part_is_no_crash(tmp_path):
    """The package alone, as `pip install transformer-engine` leaves it, raises RuntimeError when imported."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('Found empty meta package. Install extensions.')")
    words = "import te_patches.__main__ as m; m.main(['doctor', '--json'])"
    code, found = doctor(words, PYTHONPATH=str(tmp_path))
    assert code == 1
    assert found["Transformer Engine"]["state"] == "missing"
    assert "Found empty meta package" in found["Transformer Engine"]["found"]
    assert "pip install" in found["Transformer Engine"]["remedy"]


def test_cpu_the_table_shows_remedies_to_the_letter(tmp_path):
    """Brackets are no markup."""
    variables = {**process.environment(), "PYTHONPATH": ""}
    command = [sys.executable, "-m", "te_patches", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 1
    assert "'transformer-engine[pytorch]'" in done.stdout


def test_cpu_an_unusable_cache_is_a_note(tmp_path):
    (tmp_path / "file").write_text("")
    _, found = doctor(ENABLE, TE_PATCHES_CACHE=str(tmp_path / "file" / "below"))
    assert found["kernel cache"]["state"] == "note"
    assert "TE_PATCHES_CACHE" in found["kernel cache"]["remedy"]


def test_cpu_examining_patches_nothing():
    before = vars(_releases.import_fused_adam().FusedAdam)["step"]
    _doctor.examine()
    assert vars(_releases.import_fused_adam().FusedAdam)["step"] is before
    assert not te_patches.report()["applied"]
