"""Everything the engine raises on purpose: `code` for the wire, `retriable` if sending again may help."""


class EngineError(Exception):
    """The engine failed."""

    code = "engine_error"
    retriable = True

    def __init__(self, message: str | None = None, *, param: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())
        self.param = param


class InvalidRequestError(EngineError):
    """The request asks for something that is not possible."""

    code = "invalid_request"
    retriable = False


class ContextLengthExceededError(InvalidRequestError):
    """Prompt and answer together are longer than the model's context."""

    code = "context_length_exceeded"


class CacheCapacityError(InvalidRequestError):
    """The request needs more KV blocks than the cache has."""

    code = "cache_capacity_exceeded"


class ModelLoadError(EngineError):
    """The model cannot be loaded."""

    code = "model_load_failed"
    retriable = False


class KernelBuildError(EngineError):
    """The operations cannot be compiled."""

    code = "kernel_build_failed"
    retriable = False


class StreamStalledError(EngineError):
    """No token arrived within the streaming timeout."""

    code = "streaming_timeout"


class EngineDeadError(EngineError):
    """The engine thread ended; the process has to be restarted."""

    code = "engine_dead"


class CacheStoreError(EngineError):
    """The directory of the SSD tier cannot be used."""

    code = "cache_store_failed"
    retriable = False


class CacheStoreBusyError(CacheStoreError):
    """The directory of the SSD tier is in use by another process."""

    code = "cache_store_busy"
    retriable = True


class CacheStoreFullError(EngineError):
    """The store is as large as it may get: a segment has to be removed first."""

    code = "cache_store_full"


class BlockCorruptError(EngineError):
    """A stored block is not what was written."""

    code = "block_corrupt"


class ColdReadError(EngineError):
    """A part of the sequence could not be read back from the SSD."""

    def __init__(self, message: str | None = None, *, is_hung: bool = False) -> None:
        super().__init__(message)
        self.is_hung = is_hung


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the host had no memory for a step; each library has its own way to say so."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in str(error) or "not enough memory" in str(error)
