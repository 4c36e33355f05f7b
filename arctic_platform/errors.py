"""Every error that a caller can meet, as one tree.

ArcticError
|-- ConfigError             (ValueError)           a setting is unknown, contradictory or cannot take effect
|-- InputError              (ValueError)           a batch, a prompt or a file of the caller is not usable
|   |-- NonFiniteError      (ArithmeticError)      NaN or infinity where a number is needed
|   |-- NotFoundError       (LookupError)          the server has no such job or call
|   |-- WireError           (ValueError)           bytes that arrived are no message of this version
|   `-- RequestError        (ValueError)           an HTTP request cannot be answered; it knows the parameter at fault
|-- UnsupportedModelError   (NotImplementedError)  this architecture cannot be trained exactly here
|-- ExactnessError          (ArithmeticError)      shared and unshared results differ by more than the tolerance
|-- CheckpointError         (OSError)              a checkpoint cannot be written or read
|-- WeightSyncError         (RuntimeError)         trainer and sampler do not hold the same weights
|-- CallCancelledError      (RuntimeError)         a call was taken back before it could finish
|-- ServerError             (RuntimeError)         a call met a fault of the server's own, not of the caller
|   `-- WorkerLostError     (RuntimeError)         a process of the trainer or the sampler died or went silent
|-- TransportError          (ConnectionError)      the server is not reachable, stopping, full, or no such
|   |-- CallTimeoutError    (TimeoutError)         no answer within the time that the caller gave
|   `-- AccessError         (PermissionError)      the server wants an API key, and this one it does not know
`-- MissingDependencyError  (ImportError)          an optional package is needed and absent

Each is also the standard-library type in brackets, so that code that knows nothing of this package can
catch it. A message says what was given, what is accepted, and what to do.
"""


class ArcticError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(ArcticError, ValueError):
    """A setting is unknown, contradictory, or cannot take effect in this build."""


class InputError(ArcticError, ValueError):
    """What the caller handed over cannot be used as it is."""


class NonFiniteError(InputError, ArithmeticError):
    """A number is NaN or infinite; nothing was changed by the call that found it."""


class NotFoundError(InputError, LookupError):
    """A job or a call that this server does not have (any more)."""


class WireError(InputError):
    """Bytes are cut off, damaged, or a message of another version; nothing of them was used."""


class RequestError(InputError):
    """An HTTP request cannot be answered as it is.

    status: of the HTTP reply. param: the parameter at fault, if it is one. code: a name for programs, if there is one.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class UnsupportedModelError(ArcticError, NotImplementedError):
    """The isolation probe found that this architecture would not be exact, or the model has no usable part."""


class ExactnessError(ArcticError, ArithmeticError):
    """The receipt measured a difference between shared and unshared results beyond the tolerance."""


class CheckpointError(ArcticError, OSError):
    """A checkpoint is missing, incomplete, of another model, or could not be written."""


class WeightSyncError(ArcticError, RuntimeError):
    """Names, shapes, dtypes or digests of the two sides disagree; the receiver kept its old weights."""


class CallCancelledError(ArcticError, RuntimeError):
    """The call was cancelled, or its job closed, before it could finish; it changed nothing."""


class ServerError(ArcticError, RuntimeError):
    """The server failed in a way that is no fault of the caller; its log holds the traceback."""


class WorkerLostError(ServerError):
    """A training rank or the sampler's process is gone; its group was ended, and `load_checkpoint()` starts it anew."""


class TransportError(ArcticError, ConnectionError):
    """The server cannot be reached, is stopping or full, or does not speak this protocol."""


class CallTimeoutError(TransportError, TimeoutError):
    """No answer within the caller's time; the message names the call and what the server last said of it."""


class AccessError(TransportError, PermissionError):
    """The server refused the API key, or wants one."""


class MissingDependencyError(ArcticError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


def public_kind(error: ArcticError) -> type[ArcticError]:
    """The class of this module that an error is one of: what it becomes in another process."""
    kinds = (kind for kind in type(error).__mro__ if kind.__module__ == __name__ and issubclass(kind, ArcticError))
    return next(kinds)
