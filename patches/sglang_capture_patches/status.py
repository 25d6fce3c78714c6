"""The status files: ``status-<rank>.json`` of each rank, and ``status.json`` of the whole server."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_capture.claim import LOCK_NAME, Claim
from sglang_capture.quota import free_bytes
from sglang_capture.recorder import Recorder
from sglang_capture.settings import PluginSettings
from sglang_capture.spool import (
    STATUS_NAME,
    Counts,
    SpoolStatus,
    read_rank_statuses,
    write_status,
)
from sglang_capture_patches.runtime import Runtime
from sglang_capture_patches.target import Rank, local_path

logger = logging.getLogger(__name__)


@dataclass
class StatusWriter:
    """Writes what one rank is and does; the head (the first writing rank) also sums up the server."""

    directory: Path
    rank: Rank
    settings: PluginSettings
    server_id: str
    hooks: dict[str, str]
    args: Any
    claim: Claim
    quota: int = 0
    runtime: Runtime | None = None
    problem: str = ""
    started: float = field(default_factory=time.time)

    def keep(self) -> None:
        """About once a second: see what became of waiting requests, and write. Raises as :meth:`write`."""
        if not self.claim.held:
            self._lost()
        if self.runtime is not None:
            self.runtime.sweep()
        self.write()

    def _lost(self) -> None:
        """The directory was moved away or made anew: whoever made it need not know of this server."""
        if not self.problem:
            self.problem = (
                f"the spool {self.directory} is no longer the one that this server claimed (it was moved away or made "
                "anew, or its .lock was removed): restart the server"
            )
            logger.error("sglang-capture: nothing is captured any more: %s", self.problem)
        if self.runtime is not None and self.runtime.filler is not None:
            self.runtime.filler.give_up(self.problem)

    def write(self) -> None:
        """Raises OSError if the spool cannot be written; one that another server has claimed is left alone."""
        if not self.claim.held and (self.directory / LOCK_NAME).exists():
            return
        mine = self.status()
        write_status(self.directory / f"status-{self.rank.name}.json", mine)
        if self.rank.writer and self.rank.dp == 0:
            write_status(self.directory / STATUS_NAME, self._whole(mine))

    def status(self) -> SpoolStatus:
        """This rank's own status."""
        filler = self.runtime.filler if self.runtime else None
        counts = self.runtime.counts if self.runtime else Counts()
        if filler is not None:
            counts = counts + filler.counts
        used = filler.account.used - self._idle() if isinstance(filler, Recorder) else 0
        return SpoolStatus(
            state="refused" if self.problem else "capturing",
            problem=self.problem,
            server_id=self.server_id,
            pid=os.getpid(),
            rank=self.rank.name,
            writer=self.rank.writer,
            mode=self.settings.mode,
            url=_url(self.args),
            model_path=local_path(self.args.model_path),
            tokenizer_path=local_path(self.args.tokenizer_path or self.args.model_path),
            spec=self.runtime.spec.model_dump(mode="json") if self.runtime else {},
            quota_bytes=self.quota,
            used_bytes=used,
            free_bytes=max(0, min(self.quota - used, free_bytes(self.directory) + self._idle())),
            on_full=self.settings.on_full,
            token_required=self.settings.secret is not None,
            in_flight=filler.in_flight if filler else 0,
            counts=counts,
            last_error=filler.last_error if filler else "",
            hooks=self.hooks,
            sglang_version=self.runtime.spec.sglang_version if self.runtime else "",
            plugin_version=self.runtime.spec.plugin_version if self.runtime else "",
            started=self.started,
            time=time.time(),
        )

    def _idle(self) -> int:
        """Bytes of this rank's files that wait for use: as good as free."""
        filler = self.runtime.filler if self.runtime else None
        return filler.slabs.idle_bytes if isinstance(filler, Recorder) else 0

    def _whole(self, mine: SpoolStatus) -> SpoolStatus:
        """The server's status: the head's own, with the sums over the ranks that write."""
        others = [status for status in read_rank_statuses(self.directory) if status.writer and status.rank != mine.rank]
        writers = [mine, *others]
        quota, used = sum(s.quota_bytes for s in writers), sum(s.used_bytes for s in writers)
        return mine.model_copy(
            update={
                "quota_bytes": quota,
                "used_bytes": used,
                "free_bytes": max(0, min(quota - used, free_bytes(self.directory) + self._idle())),
                "in_flight": sum(s.in_flight for s in writers),
                "counts": sum((s.counts for s in others), mine.counts),
                "last_error": next((s.last_error for s in writers if s.last_error), ""),
            }
        )


def _url(args: Any) -> str:
    host = str(args.host)
    reachable = "127.0.0.1" if host in ("0.0.0.0", "") else "[::1]" if host == "::" else host
    return f"http://{reachable}:{args.port}"
