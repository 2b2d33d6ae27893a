"""The clients whose environments are there, and what runs them."""

import re
import subprocess
import sys
import sysconfig

import pytest

from tests.clients import __main__ as command
from tests.clients import runner

pytestmark = pytest.mark.skipif(
    not (runner.ROOT / "pyproject.toml").exists(), reason="not in a checkout"
)
CLIENTS = runner.clients()


VERSIONS = runner.ROOT / "docs" / "versions.md"
PAGE = VERSIONS.read_text(encoding="utf-8").partition("`./dev clients` ran")[2]
TABLE = dict(re.findall(r"^\| (.+?\)) \| .+ \| (\d+) \|$", PAGE, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS.keys())
def test_client(client, request):
    if not runner.is_set_up(client):
        pytest.skip(f"its environment is not set up: ./dev clients --set-up {client.name}")
    result = runner.run(client, request.getfixturevalue("wheel"))
    assert result.passed, result.output
    assert str(result.checks) == TABLE[client.versions[0]], f"{VERSIONS} has another number"


def test_the_page_has_the_versions_and_dates_that_are_pinned():
    """And no others. How many checks passed is compared where a client is set up."""
    assert sorted(TABLE) == sorted(client.versions[0] for client in CLIENTS.values())
    (torch,) = {client.versions[1] for client in CLIENTS.values()}
    assert torch in PAGE.partition("\n\n")[0].replace("\n", " ")
    assert f"\n| {torch} | " in PAGE  # the table of torch's releases


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS.keys())
def test_every_version_is_pinned(client):
    text = client.requirements.read_text()
    assert all(map(runner.PACKAGE.fullmatch, text.partition("\n\n")[0].splitlines()))
    lines = [line.partition("  #")[0] for line in text.splitlines()]
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+(; .+)?", pin)] == []
    (torch,) = re.findall("^torch==.+", (runner.ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch in pins
    assert any(pin.startswith("pytest==") for pin in pins)
    assert (client.folder / "checks.py").exists()


# -- running -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(tmp_path_factory, wheel):
    """A client with the wheel alone; its environment borrows pytest and torch from this one."""
    root = tmp_path_factory.mktemp("toy")
    client = runner.Client(root / "toy", root / ".clients" / "toy")
    client.folder.mkdir()
    words = [sys.executable, "-m", "venv", "--without-pip", client.environment]
    subprocess.run(words, check=True)
    ask = [client.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    with open(f"{packages}/borrowed.pth", "w") as borrowed:
        borrowed.write(sysconfig.get_path("purelib"))
    run(client, wheel, "")
    return client


def run(client, wheel, checks, **options):
    (client.folder / "checks.py").write_text(checks)
    return runner.run(client, wheel, **options)


@pytest.fixture
def _wheel_stays(monkeypatch):
    """Spare the seconds that pip takes."""
    monkeypatch.setattr(runner, "_pip", lambda *words: None)


@pytest.mark.usefixtures("_wheel_stays")
@pytest.mark.slow
def test_checks_see_the_wheel_and_not_the_tree(toy, wheel, monkeypatch):
    """It takes 4 s: the wheel, an environment, pip, two runs of pytest, an import of torch."""
    monkeypatch.setenv("PYTHONPATH", str(runner.ROOT / "src"))
    checks = (
        "import sys, apex, amp_C, importlib.metadata\n"
        "def test_place():\n"
        "    assert apex.__file__.startswith(sys.prefix)\n"
        "    assert amp_C.__file__.startswith(sys.prefix)\n"
        "def test_metadata():\n"
        "    assert importlib.metadata.version('apex') == apex.__version__\n"
    )
    result = run(toy, wheel, checks)
    assert result.passed, result.output
    assert result.checks == 2
    assert re.fullmatch(r"toy +passed +2 checks passed +\d+\.\d s", str(result))


@pytest.mark.parametrize(
    ("checks", "said"),
    [
        ("def test_a(): assert 1 == 2\ndef test_b(): pass", "assert 1 == 2"),
        ("import pytest\ndef test_a(): pytest.skip('not today')\ndef test_b(): pass", "not today"),
        ("def test_a(): pass\nimport absent", "No module named 'absent'"),
        ("", "no tests ran"),
    ],
    ids=["fails", "skips", "does not import", "has no checks"],
)
@pytest.mark.usefixtures("_wheel_stays")
@pytest.mark.slow
def test_anything_but_passed_fails_and_is_shown(toy, wheel, checks, said):
    result = run(toy, wheel, checks)
    assert not result.passed
    assert said in result.output
    assert "FAILED" in str(result)


@pytest.mark.usefixtures("_wheel_stays")
@pytest.mark.slow
def test_checks_that_hang_are_stopped(toy, wheel):
    checks = "import time\ndef test_a():\n    time.sleep(600)\n"
    result = run(toy, wheel, checks, seconds=1)
    assert not result.passed
    assert result.output.endswith("toy: stopped after 1 s\n")


def test_the_tree_is_refused():
    """This environment has the tree in it, by an editable install."""
    words = [sys.executable, "-I", runner.HERE / "inside.py", "checks.py"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(
        rf"apex is .+, not the one installed in {re.escape(sys.prefix)}\n", done.stderr
    )


# -- setting up ----------------------------------------------------------------------------------


@pytest.fixture
def client(tmp_path):
    made = runner.Client(tmp_path / "toy", tmp_path / ".clients" / "toy")
    made.folder.mkdir()
    made.requirements.write_text("one==1.0  # 2026-01-02\ntorch==2.13.0  # 2026-07-08\n")
    return made


@pytest.fixture
def steps(client, monkeypatch):
    """Replace what is slow; the list holds the last words of what was run."""
    steps = []

    def must_run(words):
        client.environment.mkdir(parents=True, exist_ok=True)
        steps.append(str(words[-1]))

    monkeypatch.setattr(runner, "_must_run", must_run)
    return steps


def full(client):
    return [str(client.environment), "torch==2.13.0", str(client.requirements)]


def test_a_set_up_is_done_once_and_again_if_requirements_change(client, steps):
    assert not runner.is_set_up(client)
    for _ in range(2):
        runner.set_up(client)
    assert steps == full(client)
    assert runner.is_set_up(client)
    client.requirements.write_text("# ours\none==1.0  # 2026-01-03\ntorch==2.13.0\n")
    assert runner.is_set_up(client)
    client.requirements.write_text("one==1.1\ntorch==2.13.0\n")
    runner.set_up(client)
    assert steps == 2 * full(client)


@pytest.mark.parametrize("ended_by", [KeyboardInterrupt, runner.SetUpError])
def test_a_set_up_that_was_cut_short_begins_anew(client, steps, monkeypatch, ended_by):
    runner.set_up(client)
    before = client.requirements.read_text()
    client.requirements.write_text("one==1.1\ntorch==2.13.0\n")
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_pip", lambda *_: (_ for _ in ()).throw(ended_by))
        with pytest.raises(ended_by):
            runner.set_up(client)
    client.requirements.write_text(before)  # what had been set up
    assert not runner.is_set_up(client)


def test_what_pip_said_is_the_error():
    words = [sys.executable, "-c", "print('x\\nERROR: no such version\\ny'); raise SystemExit(1)"]
    with pytest.raises(runner.SetUpError, match=r"^-c .+: ERROR: no such version$"):
        runner._must_run(words)


# -- the command ---------------------------------------------------------------------------------


def test_versions_are_told_with_the_dates_of_their_release(client):
    assert client.versions == ("one 1.0 (2026-01-02)", "torch 2.13.0 (2026-07-08)")


def test_a_wrong_name_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["tim"])
    assert stopped.value.code == 2
    assert "no client is called 'tim': choose from accelerate, fabric," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "last"),
    [
        ([], 1, f"clients: {len(CLIENTS)} run, 1 failed: timm"),
        (["fabric", "fabric"], 0, "clients: 1 run, all passed"),
        (["timm"], 1, "clients: 1 run, 1 failed: timm"),
    ],
)
def test_the_command_sums_up(monkeypatch, capsys, arguments, code, last):
    def ran(client, wheel):
        return runner.Result(client.name, client.name != "timm", 3, 1.0, f"{client.name} said\n")

    monkeypatch.setattr(command, "set_up", lambda client: None)
    monkeypatch.setattr(command, "is_set_up", lambda client: True)
    monkeypatch.setattr(command, "build_wheel", lambda folder: "wheel")
    monkeypatch.setattr(command, "run", ran)
    assert command.main(arguments) == code
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == last
    assert "with torch 2.13.0 (2026-07-08), Python 3." in out
    assert all(client.versions[0] in out for name, client in CLIENTS.items() if name in arguments)
    assert ("timm said" in out) == (code == 1)  # the output of those that failed
    assert "fabric said" not in out


def test_a_set_up_that_fails_is_one_line(monkeypatch, capsys):
    def fail(client):
        raise runner.SetUpError("pip: no network")

    monkeypatch.setattr(command, "is_set_up", lambda client: True)
    monkeypatch.setattr(command, "set_up", fail)
    assert command.main(["timm"]) == 2
    assert capsys.readouterr().err == "clients: pip: no network\n"
