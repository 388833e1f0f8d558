"""The command line as its users type it."""

from pathlib import Path

import pytest

from worker.cli import main, submit_main
from worker.cli.settings_help import CLIENT_SETTINGS, SETTINGS_HELP
from worker.settings import Settings


def _run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.mark.parametrize("flag", ["--max-num-seqs", "--max_num_seqs", "--max-batch-size", "--max_batch_size"])
def test_flags_are_taken_with_hyphens_and_underscores(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Both spellings and the alias set the same setting."""
    assert _run(["config", "show", flag, "9"]) == 0
    assert "max_num_seqs = 9  (flag)" in capsys.readouterr().out


def test_a_bad_setting_is_one_line_and_a_failing_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback for what a user can mend."""
    assert _run(["config", "show", "--port", "many"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("v4flash: port (from flag)")
    assert error.count("\n") == 1


def test_each_setting_is_explained_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """A new setting gets its sentence with its flag, and no flag is cut off on a narrow terminal."""
    assert set(Settings.model_fields) <= set(SETTINGS_HELP)
    assert _run(["worker", "--help"]) == 0
    told = capsys.readouterr().out
    assert [name for name in Settings.model_fields if f"--{name.replace('_', '-')}" not in told] == []


def test_a_command_that_only_talks_to_the_broker_keeps_its_help_short(capsys: pytest.CaptureFixture[str]) -> None:
    """Settings of the engine are taken, so that one configuration serves all, but not listed."""
    assert set(Settings.model_fields) >= CLIENT_SETTINGS
    assert _run(["cancel", "--help"]) == 0
    told = capsys.readouterr().out
    assert "--bootstrap-servers" in told
    assert "--num-blocks" not in told


def test_the_version_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """What a bug report has to name."""
    assert _run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("v4flash ")


def test_a_dashed_executable_names_the_command_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What its help says can be typed."""
    monkeypatch.setattr("sys.argv", ["v4flash-submit", "--help"])
    with pytest.raises(SystemExit):
        submit_main()
    assert "Usage: v4flash submit [OPTIONS]" in capsys.readouterr().out


def test_the_demo_answers_all_its_prompts_without_a_broker(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 and a row for each prompt of the three classes."""
    assert _run(["demo", "--once", "--memory", "--engine", "scripted"]) == 0
    assert "finish reason" in capsys.readouterr().out


def test_building_kernels_without_a_compiler_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image build fails there, instead of shipping what its machines could not use."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["build-kernels", "--directory", str(tmp_path / "kernels")])
    assert ended.value.code == 1
    assert "no C++ compiler" in capsys.readouterr().err
