"""The sticky abort flag, time-out records, and the thread that turns them into ``CollectiveTimeout`` (decode.md L.6)."""


class Watchdog:
    """Polls the records that bounded waits leave behind and raises for the rank that waits on them."""

    def __init__(self) -> None:
        raise NotImplementedError("parallel.watchdog.Watchdog")
