"""HTTP clients: one for an SGLang server, one for the side service.

Both are for many requests at once from one event loop, and both tell failures that trying again may mend
(``retriable``) from those it will not. They talk to their server directly: a proxy set in the environment is for the
internet, not for the process next door.
"""

from sglang_capture.client.engine import Answer, EngineError, EngineUnreachable, ServerInfo, SGLangClient
from sglang_capture.client.service import SERVICE_URL, ServiceClient, ServiceError, ServiceUnreachable

__all__ = [
    "SERVICE_URL",
    "Answer",
    "EngineError",
    "EngineUnreachable",
    "SGLangClient",
    "ServerInfo",
    "ServiceClient",
    "ServiceError",
    "ServiceUnreachable",
]
