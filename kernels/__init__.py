if __name__ != "path_backend.kernels":
    raise ImportError(
        f"import path_backend.kernels, not {__name__}: a second copy would register twice"
    )
