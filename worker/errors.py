"""What keeps a worker from starting, said in words that name the cause."""


class WorkerError(Exception):
    """The worker cannot go on."""

    code = "worker_error"
    retriable = False


class SettingsError(WorkerError):
    """A setting is unknown or has a value that cannot be used."""

    code = "invalid_settings"


class StartError(WorkerError):
    """The worker cannot start."""

    code = "start_failed"
