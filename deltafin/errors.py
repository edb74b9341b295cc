"""The closed list of errors a user can cause: what happened, where, and what to do."""


class DeltafinError(Exception):
    """A user's mistake, shown as one message without a traceback.

    ``hint``, when given, is a second sentence that says what to do.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")
        self.message = message
        self.hint = hint


class ConfigError(DeltafinError):
    """A model's configuration asks for something that is not supported or makes no sense."""


class CheckpointError(DeltafinError):
    """A model's files are missing, cut, damaged or not what the configuration promises."""


class HubError(DeltafinError):
    """A repository of the hub cannot be reached, or not be read, or what it sends is not what it published."""


class TokenizerError(DeltafinError):
    """Vocabulary files are missing or damaged; models still run on token ids without them."""


class ChatError(DeltafinError):
    """Messages, tools or options that a chat format cannot express."""


class SessionError(DeltafinError):
    """A saved session is damaged or belongs to another model."""


class NumericsError(DeltafinError):
    """The model produced NaN or infinity; nothing was sampled from it."""


class UsageError(DeltafinError):
    """An argument or option that cannot work."""


class StorageError(DeltafinError):
    """Something cannot be written: no space, no permission, a broken disk."""
