"""How many files and connections a process may have open."""

import logging
import resource

logger = logging.getLogger(__name__)

# Some programs go through all that they may have, and the limit may be a billion.
_ENOUGH = 65_536


def allow_descriptors(needed: int) -> None:
    """Raise this process's limit as far as it goes; warn if it is below ``needed``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft != resource.RLIM_INFINITY and soft < needed:
        logger.warning(
            "this process may have %d files and connections open, and %d clients and "
            "strangers at once need %d: raise its limit (ulimit -n, LimitNOFILE)",
            soft,
            needed // 2,
            needed,
        )
