if __name__ != "path_backend.kernels":
    # A folder of the checkout, found under its bare name, which Hugging Face transformers probes
    # for a package of its own: a version that is too old, and no submodule, so that no second copy
    # can register its operators.
    __version__ = "0"
    __path__ = []
