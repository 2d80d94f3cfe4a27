# Sourced by run_train.sh, run_tests.sh and .ci/run: sets `python` to an interpreter that has
# path-backend, its extras and the versions in constraints.txt, installing them if need be.
#
#   PYTHON             interpreter to build the environment from (default: the first >= 3.10 found)
#   PATH_BACKEND_VENV  where the environment lives (default: .venv beside this file);
#                      "none" installs nothing and uses PYTHON, or python3, as it is

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

supported() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

find_python() {
    if [[ -n "${PYTHON:-}" ]]; then
        if ! supported "$PYTHON"; then
            echo "PYTHON must be Python 3.10 or newer," \
                "got '$PYTHON' ($("$PYTHON" --version 2>&1 || true))" >&2
            return 1
        fi
        echo "$PYTHON"
        return
    fi
    local candidate
    for candidate in python3 python python3.{14,13,12,11,10}; do
        if supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "expected Python 3.10 or newer on PATH, found none: set PYTHON to one" >&2
    return 1
}

# What an installed environment depends on; written only after a complete installation.
fingerprint() {
    echo "$repository"
    cat "$repository/pyproject.toml" "$repository/constraints.txt" "$repository/environment.sh" | cksum
}

install_environment() {
    local venv="$1" base torch
    torch="$(grep '^torch==' "$repository/constraints.txt")" || return 1
    if ! supported "$venv/bin/python"; then
        base="$(find_python)" || return 1
        [[ "$venv" != "$repository/.venv" ]] || rm -rf "$venv" # half made, or its Python is gone
        if ! "$base" -m venv "$venv"; then
            echo "'$base -m venv' failed: install that Python's venv module, or set PYTHON" >&2
            return 1
        fi
    fi
    echo "Installing into $venv; the first time takes minutes" >&2
    local pip=("$venv/bin/python" -m pip install)
    "${pip[@]}" "pip>=23" || return 1
    # By its exact version and first: a bare "torch" may resolve to another build.
    "${pip[@]}" "$torch" || return 1
    "${pip[@]}" --constraint "$repository/constraints.txt" --editable "$repository[dev]" || return 1
    fingerprint >"$venv/path_backend_installed"
}

if [[ "${PATH_BACKEND_VENV:-}" == none ]]; then
    python="$(find_python)" || exit 1
else
    venv="${PATH_BACKEND_VENV:-$repository/.venv}"
    if ! supported "$venv/bin/python" ||
        [[ "$(cat "$venv/path_backend_installed" 2>/dev/null)" != "$(fingerprint)" ]]; then
        install_environment "$venv" >&2 || exit 1
    fi
    python="$venv/bin/python"
fi
