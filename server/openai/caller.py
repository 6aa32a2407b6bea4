"""The sender of a request, and the request's scheduling: the engine's RequestContext."""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass

from jaxinfer.request import RequestContext
from server.openai.errors import ApiError, quoted
from server.openai.protocol import TIERS, SamplingBody
from server.usage import RequestIdentity

ANONYMOUS = "anonymous"  # the tenant of a server without keys
SESSION_HEADER = "x-session-affinity"
SESSION = re.compile(r"[!-~]{1,256}")  # visible ASCII


@dataclass(frozen=True, slots=True)
class Caller:
    """What is known of a request before its body is read."""

    tenant: str = ANONYMOUS
    request_id: str = ""
    session: str | None = None  # chosen by the client
    may_go_ahead: bool = True  # whether it may have a priority before the default
    priority: int | None = None  # overrides the body's
    timeout: float | None = None  # most seconds; limits the body's

    def context(self, body: SamplingBody) -> RequestContext:
        """The request's scheduling context; its time runs from now on. Raises `RequestError` for a priority out of its
        range.

        Sessions and namespaces belong to the tenant: no name or salt leads to another's.
        """
        priority = body.asked_priority if self.priority is None else self.priority
        timeouts = [seconds for seconds in (body.timeout, self.timeout) if seconds is not None]
        # Salts may be of any length, and namespaces are stored with pages.
        salt = "" if body.cache_salt is None else "/" + hashlib.sha256(body.cache_salt.encode()).hexdigest()
        return RequestContext(
            tenant=self.tenant,
            namespace=self.tenant + salt,
            session=None if self.session is None else f"{self.tenant}/{self.session}",
            priority=priority if self.may_go_ahead else max(priority, 0),
            deadline=time.monotonic() + min(timeouts) if timeouts else None,
        )


UNKNOWN = Caller()


def checked_session(name: str | None) -> str | None:
    """The session header's value. Raises `ApiError` 400 for an invalid one."""
    if name is not None and not SESSION.fullmatch(name):
        message = f"the header {SESSION_HEADER} is {quoted(name)}: send 1 to 256 visible ASCII characters, or leave it out"
        raise ApiError(400, message, param=SESSION_HEADER, code="invalid_value")
    return name


def tier_of(context: RequestContext) -> str | None:
    """The service tier of a request's priority, as a reply names it; None for a priority between the tiers."""
    return next((tier for tier, priority in reversed(TIERS.items()) if priority == context.priority), None)


def request_identity(caller: Caller, context: RequestContext, id: str, endpoint: str, model: str) -> RequestIdentity:
    """The request's identity in its usage record."""
    return RequestIdentity(id, caller.request_id, caller.tenant, caller.session, endpoint, model, tier_of(context), context.priority)
