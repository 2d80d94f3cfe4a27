#!/usr/bin/env bash
# Run the tests, in an environment made on the first call (see environment.sh).
# Arguments are passed to pytest: ./run_tests.sh -n 2 -k dataset

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source ./environment.sh

exec "$python" -m pytest "$@"
