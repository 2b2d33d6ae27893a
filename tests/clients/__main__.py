"""The command line of ./dev clients."""

# ruff: noqa: T201  (a command line speaks by print)

import argparse
import platform
import sys
import tempfile

from tests.clients.runner import SetUpError, build_wheel, clients, is_set_up, run, set_up

DESCRIPTION = """\
Run unmodified packages from the package index against the wheel of this tree, each in its own
environment (.clients/NAME). The first run needs a network, some minutes, and about 1 GB of disk
for each client."""


def main(arguments=None):
    """Set up and run the clients; return 0 if all passed, 1 if one failed, 2 if one cannot run."""
    known = clients()
    parser = argparse.ArgumentParser(prog="./dev clients", description=DESCRIPTION)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; or all")
    parser.add_argument("--set-up", action="store_true", help="only make the environments")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in known:
            parser.error(f"no client is called {name!r}: choose from {', '.join(known)}")
    chosen = [known[name] for name in dict.fromkeys(options.names) or known]
    try:
        for client in chosen:
            if not is_set_up(client):
                print(f"setting up {client.environment}", flush=True)
            set_up(client)
        return 0 if options.set_up else _run_all(chosen)
    except (SetUpError, OSError) as error:
        print(f"clients: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("clients: interrupted", file=sys.stderr)
        return 130


def _run_all(chosen):
    failed = []
    print(f"with {chosen[0].versions[1]}, Python {platform.python_version()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(folder)
        for client in chosen:
            result = run(client, wheel)
            if not result.passed:
                failed.append(result.name)
                print(result.output, end="")
            print(f"{result}   {client.versions[0]}", flush=True)
    said = f"{len(failed)} failed: {', '.join(failed)}" if failed else "all passed"
    print(f"clients: {len(chosen)} run, {said}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
