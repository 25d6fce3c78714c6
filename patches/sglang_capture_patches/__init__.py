"""Everything that touches SGLang. ``register`` is the entry point ``sglang_capture`` in ``sglang.srt.plugins``.

SGLang calls it in every process of a server, before any model is loaded. It checks what it is about to hook
(:mod:`.compat`), registers the hooks with SGLang's own registry, and changes nothing else; the model is looked at when
it is loaded (:mod:`.model_load`). One module per patched place:

=================== ==============================================================================
``model_load``      after the target is loaded: can it be captured, are all hooks attached
``batch_plan``      when a prefill batch becomes a forward: which rows belong to which capture
``model_forward``   around the forward of a marked batch: taps in the decoder layers and the norm
``prefix_cache``    marked prompts are computed whole, whatever the cache holds
``prefill_graph``   marked prefills run eagerly; others keep their CUDA graphs
``beam_search``     requests for beam search keep their mark
``queued``          a marked request that leaves the queue uncomputed is a failure, not a silence
``weights_changed`` weights that are changed in a running server have another digest
=================== ==============================================================================
"""

from __future__ import annotations

import logging
import os
import uuid

from sglang_capture.settings import SettingsError, plugin_settings

SERVER_ID = "SGLANG_CAPTURE_SERVER_ID"
"""Set in the launcher, inherited by all processes of one server: what tells its ranks from another server's."""

logger = logging.getLogger(__name__)

_registered = False


def register() -> None:
    """Register the hooks, once per process.

    With ``SGLANG_CAPTURE_STRICT`` (the default) a server that cannot capture ends here with a message: SGLang swallows
    a plugin's exceptions, but not ``SystemExit``. Without it the server runs, unhooked.

    Raises:
        SystemExit: a setting is unusable, or this SGLang is not one that can be hooked.
    """
    global _registered
    if _registered:
        return
    _registered = True
    os.environ.setdefault(SERVER_ID, uuid.uuid4().hex)
    try:
        settings = plugin_settings()
    except SettingsError as error:
        raise SystemExit(f"sglang-capture: {error}") from None
    if settings.mode == "off":
        logger.info("sglang-capture: SGLANG_CAPTURE_MODE=off, nothing is hooked")
        return
    from sglang_capture_patches import compat, hooks

    report = compat.check()
    if report.problems:
        if settings.strict:
            raise SystemExit(report.message())
        logger.error("%s", report.message())
        return
    if report.note:
        logger.warning("sglang-capture: %s", report.note)
    hooks.register_all()
