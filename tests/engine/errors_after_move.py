"""Where a class of `errors_app` is after it was moved."""


class Moved(Exception):
    """As in `errors_before_move`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
