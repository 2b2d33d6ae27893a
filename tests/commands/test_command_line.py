import importlib.util
import subprocess
import sys
import types

import pytest

import apex
from apex.commands import command_line as cli


def _command(run=lambda args: 0, add_arguments=lambda parser: None):
    return types.SimpleNamespace(HELP="Says hello.", add_arguments=add_arguments, run=run)


@pytest.fixture
def install(monkeypatch):
    """Put a command called `hello` into the table."""

    def put(**parts):
        monkeypatch.setitem(sys.modules, "apex_hello", _command(**parts))
        monkeypatch.setitem(cli.COMMANDS, "hello", cli.Command("apex_hello", "says hello"))

    return put


def _raise(error):
    def run(args):
        raise error

    return run


def _one_line(capsys):
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.endswith("\n")
    assert errors.count("\n") == 1
    return errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: COMMAND"),
        (["nonsense"], "apex: COMMAND nonsense is unknown: use info, bench, "),
        (
            ["selftests"],
            "apex: COMMAND selftests is unknown: did you mean 'selftest'? (see 'apex --help')",
        ),
        (["--nonsense"], "required: COMMAND"),
        (["info", "--nonsense"], "apex info: unrecognized arguments: --nonsense"),
        (["info", "more"], "apex info: unrecognized arguments: more"),
        (["info", "kernels"], "apex info: unrecognized arguments: kernels"),
    ],
)
def test_bad_arguments_get_one_line_and_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    errors = _one_line(capsys)
    assert message in errors
    assert errors.startswith("apex")
    assert "--help" in errors


def test_a_bad_option_of_a_command_names_the_command(capsys, install):
    install(add_arguments=lambda parser: parser.add_argument("--n", type=int))
    with pytest.raises(SystemExit, match="2"):
        cli.main(["hello", "--n", "many"])
    assert "apex hello: argument --n: invalid int value: 'many'" in _one_line(capsys)


def test_a_command_of_two_words(capsys, install, monkeypatch):
    install(run=lambda args: 1)
    two = _command(run=lambda args: args.n, add_arguments=lambda p: p.add_argument("--n", type=int))
    monkeypatch.setitem(sys.modules, "apex_hello_world", two)
    monkeypatch.setitem(cli.COMMANDS, "hello world", cli.Command("apex_hello_world", "greets"))
    assert cli.main(["hello"]) == 1
    assert cli.main(["hello", "world", "--n", "7"]) == 7
    with pytest.raises(SystemExit, match="2"):
        cli.main(["hello", "world", "--n", "many"])
    assert "apex hello world: argument --n: invalid int value: 'many'" in _one_line(capsys)
    with pytest.raises(SystemExit, match="0"):
        cli.main(["hello", "--help"])
    assert "see also: apex hello world" in capsys.readouterr().out


def test_usage_error_gets_one_line_and_2(capsys, install):
    install(run=_raise(cli.UsageError("no\nsuch  level")))
    assert cli.main(["hello"]) == 2
    assert _one_line(capsys) == "apex hello: no such level\n"


def test_interrupt_gets_one_line_and_130(capsys, install):
    install(run=_raise(KeyboardInterrupt()))
    assert cli.main(["hello"]) == 130
    assert _one_line(capsys) == "apex hello: interrupted\n"


def test_all_that_is_missing_is_named_before_anything_runs(capsys, install, monkeypatch):
    install(run=pytest.fail)
    needs = ("no_such_package", "json", "sklearn")
    monkeypatch.setitem(cli.COMMANDS, "hello", cli.Command("apex_hello", "says hello", needs))
    find = importlib.util.find_spec
    hidden = lambda name: None if name == "sklearn" else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    said = (
        "no_such_package, scikit-learn not installed: pip install no_such_package scikit-learn "
        "(in a clone of apex: pip install '.[bench]')"
    )
    assert cli.main(["hello"]) == 2
    assert _one_line(capsys) == f"apex hello: {said}\n"
    monkeypatch.delitem(sys.modules, "apex_hello")  # its import is what fails
    assert cli.main(["hello"]) == 2
    assert _one_line(capsys) == f"apex hello: {said}\n"


@pytest.mark.parametrize("error", [ModuleNotFoundError("x", name="apex.amp"), ZeroDivisionError()])
def test_a_defect_keeps_its_traceback(install, error):
    install(run=_raise(error))
    with pytest.raises(type(error)):
        cli.main(["hello"])


def test_the_exit_code_is_the_command_s(install):
    install(run=lambda args: 7)
    assert cli.main(["hello"]) == 7


def test_help_lists_the_commands_and_imports_none(capsys, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "hello", cli.Command("apex.no_such_module", "says hello"))
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert "info " in out
    assert "bench " in out
    assert "says hello" in out


def test_help_of_a_command(capsys, install):
    install(add_arguments=lambda parser: parser.add_argument("--loud", help="shout"))
    with pytest.raises(SystemExit, match="0"):
        cli.main(["hello", "--help"])
    out = capsys.readouterr().out
    assert "usage: apex hello" in out
    assert "Says hello." in out
    assert "shout" in out


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"apex {apex.__version__}\n"


@pytest.mark.slow
def test_python_m_apex_and_a_reader_that_goes_away():
    """`python -m apex info | true`: no complaint about the closed pipe.

    It takes 2 s: an import of torch.
    """
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PIPE_PROBE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == cli.BROKEN_PIPE


PIPE_PROBE = """
import runpy, sys
from apex.commands.info import speeds
speeds.OPERATIONS.clear()  # their times take as long as the import of torch
sys.argv = ["apex", "info", "--json"]
runpy.run_module("apex", run_name="__main__")
"""


@pytest.mark.parametrize("words", [["kernels"], ["kernels", "--kernel", "lion"], ["kernels", "-h"]])
def test_the_command_line_says_where_its_command_has_gone(capsys, words):
    assert cli.main(words) == 2
    out, errors = capsys.readouterr()
    assert (out, errors.count("\n")) == ("", 1)
    assert errors.startswith("apex kernels: is a developers' tool now: run ./dev kernels")
