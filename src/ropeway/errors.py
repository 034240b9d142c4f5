"""Every exception that Ropeway raises on purpose, and nothing else.

    RopewayError
    ├── InvalidRequestError        the caller's request is wrong; nothing was started     (HTTP 400)
    │   ├── RequestTooLargeError   it could never fit the context or the KV pool          (HTTP 400)
    │   └── UnsupportedFieldError  a field that would change the answer and is not served (HTTP 400)
    ├── UnknownModelError          the named model is not the one being served            (HTTP 404)
    ├── OverloadedError            refused at the door, try again later                   (HTTP 503)
    │   └── RateLimitedError       a caller exceeds what its key allows                   (HTTP 429)
    ├── RequestTimeoutError        accepted, and out of time before its end               (HTTP 504)
    ├── SlowClientError            the client sends its request or reads its answer too slowly (HTTP 408)
    ├── EngineStoppedError         the engine has shut down or failed                     (HTTP 503)
    ├── ModelFileError             the model file is truncated, corrupt, hostile or not a model
    │   └── UnsupportedModelError  well-formed, but an architecture, tensor type or tokenizer we do not have
    ├── ModelFetchError            a named model is neither cached nor obtainable
    ├── BatchStoreError            files and batches cannot be kept                       (HTTP 503)
    ├── DecisionLogError           a decision log is of another version, damaged, or no log at all
    ├── ConfigError                an option or a combination of options is wrong
    │   └── OutOfMemoryError       what was asked for does not fit this machine's memory
    └── UnsupportedIsaError        an instruction set this processor or build does not have

The message of each names what was wrong, the numbers involved, and the remedy, in one line.
"""

from __future__ import annotations


class RopewayError(Exception):
    """The root of every error that Ropeway raises on purpose."""


class InvalidRequestError(RopewayError):
    """A request is wrong. `param` is the name of the offending field, where one field is to blame."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLargeError(InvalidRequestError):
    """A request could never run, however idle the engine: the message carries the numbers."""


class UnsupportedFieldError(InvalidRequestError):
    """A field that would change the answer is not supported; it is refused rather than ignored."""


class UnknownModelError(RopewayError):
    """The request names a model that is not being served."""


class OverloadedError(RopewayError):
    """Refused at the door; trying again later may succeed. `retry_after_s`: how much later, where it is known."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimitedError(OverloadedError):
    """A caller exceeds the requests or tokens per minute that its key allows."""


class RequestTimeoutError(RopewayError):
    """The time that a request allowed itself was over before its end."""


class SlowClientError(RopewayError):
    """The client took too long to send its request or to read its answer, or left too much of the answer unread."""


class EngineStoppedError(RopewayError):
    """The engine has stopped, so the request cannot be (or was not) completed."""


class ModelFileError(RopewayError):
    """A model file cannot be read: truncated, corrupt, hostile, or not a model file at all."""


class UnsupportedModelError(ModelFileError):
    """A well-formed model file that needs something Ropeway does not have; the message names it."""


class ModelFetchError(RopewayError):
    """A named model is neither in the cache nor obtainable now."""


class BatchStoreError(RopewayError):
    """Files and batches cannot be kept where they should be, or not now."""


class DecisionLogError(RopewayError):
    """A decision log cannot be read: another version, damaged, or not a log at all."""


class ConfigError(RopewayError):
    """An option, or a combination of options, is wrong."""


class OutOfMemoryError(ConfigError):
    """What was asked for does not fit this machine's memory; the message carries the numbers."""


class UnsupportedIsaError(RopewayError):
    """The instruction set asked for is unknown, not built in, or not had by this processor."""
