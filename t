#!/bin/bash
cd ${W:-/tmp/w/procs}; unset PYTHONDONTWRITEBYTECODE
PYTHONPATH=src:src/extension_modules:/tmp/w/tools exec /work/main/.venv/bin/python /tmp/w/tools/cpuwrap.py /work/main/.venv/bin/python -m pytest -q -p cpuplug -p no:cacheprovider -n 0 --full "$@"
