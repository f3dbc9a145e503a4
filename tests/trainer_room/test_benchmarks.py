"""The benchmarks run to their end and print what is needed to read them."""

import os
import subprocess
import sys

import pytest
import torch

from benchmarks import stability

pytestmark = pytest.mark.training


def run(module: str, *told: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", module, *told],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_benchmark_of_saves_beside_the_training_runs_to_its_end() -> None:
    small = ["--turns", "1", "--saves", "2", "--every", "2", "--hidden", "32", "--layers", "1"]
    done = run("benchmarks.saves", *small)
    assert f"python -m benchmarks.saves {' '.join(small)}" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()[-3:]]
    assert [row[0] for row in rows] == ["plain", "higgsfield", "in"]
    assert all(float(figure) > 0 for row in rows for figure in row[2:4])
    assert float(rows[2][-1]) > 0  # some were written beside the training


def test_the_benchmark_of_saves_and_resumes_runs_to_its_end() -> None:
    small = ["--steps", "3", "60", "--repeats", "1", "--hidden", "16", "--layers", "1"]
    done = run("benchmarks.checkpoint", *small)
    assert f"python -m benchmarks.checkpoint {' '.join(small)}" in done.stdout
    assert "torch" in done.stdout
    assert "median of 1, in seconds" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("plain", "higgsfield"))]
    assert [row[-4] for row in rows[:4]] == ["3", "3", "60", "60"]
    assert all(float(figure) > 0 for row in rows[:4] for figure in row[-3:])
    assert [row[-5:-2] for row in rows[4:]] == [["60", "/", "3"]] * 2


def test_the_benchmark_of_the_supervisor_runs_to_its_end() -> None:
    argv = [sys.executable, "-m", "benchmarks.supervisor", "--runs", "1", "3", "--seconds", "1", "--settle", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["1", "3"]
    assert all(float(cell.split()[0]) >= 0 for row in rows for cell in row)


def test_the_benchmark_of_stability_runs_to_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two = ["--only", stability.GUARDED, "--only", stability.OURS]
    monkeypatch.setattr(sys, "argv", ["", "--tiny", "--seeds", "1", "--cause", stability.HOT_RATE, *two])
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    threads = torch.get_num_threads()
    stability.main()
    torch.set_num_threads(threads)
    table = capsys.readouterr().out
    assert "python -m benchmarks.stability --tiny --seeds 1 --cause 'hot rate' --only " in table
    guarded, ours = (line.split(" | ") for line in table.splitlines()[-2:])
    assert guarded[1] == stability.GUARDED
    assert (ours[1], ours[2], ours[-1]) == (stability.OURS, "1 of 1", "0 |")
