"""What every transport says of calls that cannot be made, or were not waited for."""

from arctic_platform.errors import CallTimeoutError, InputError
from arctic_platform.rl.protocol import Request

NOBODY_SAYS = "the server could not be asked why"


def shut_down() -> InputError:
    """For a call of a client that was closed."""
    return InputError("this client was shut down; create a new one with create_arctic_rl_client(config)")


def server_says(reason: str) -> str:
    """What became of a call that was taken back, in the server's words."""
    return f"the server says: {reason or 'it was taken back before it began'}"


def beyond_time(request: Request, seconds: float | None, reason: str) -> CallTimeoutError:
    """For a call that took longer than `call_timeout`."""
    return CallTimeoutError(
        f"{request.method} was not finished within call_timeout={seconds:g} s and was cancelled; {reason}"
    )
