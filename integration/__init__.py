if __name__ != "path_backend.integration":
    # A folder of the checkout, found under its bare name: no submodule is importable from here, so
    # that no second copy of the package can exist, and a probe for a version finds one too old.
    __version__ = "0"
    __path__ = []
