if __name__ != "path_backend.integration":
    raise ImportError(
        f"import path_backend.integration, not {__name__}: a second copy would register twice"
    )
