"""Where a class of `errors_app` is before it is moved."""


class Moved(Exception):
    """An error whose class is moved to another module by a deploy."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
