"""`gpusync serve`: a host agent that holds a checkpoint's weights and brings them to published versions."""

from __future__ import annotations

import importlib.util
import ipaddress
import json
from pathlib import Path

import click

DIRECTORY = click.Path(path_type=Path)


@click.command("serve")
@click.option("--model", type=DIRECTORY, required=True, help="The checkpoint to start from: safetensors files.")
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help="Tensor-parallel workers.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=30000, show_default=True, help="0 takes a free one.")
@click.option("--source-dir", type=DIRECTORY, help="The stream, for requests that name none.")
@click.option("--local-checkpoint-dir", type=DIRECTORY, help="The local checkpoint; attached to at the start.")
@click.option("--source-root", type=DIRECTORY, multiple=True, help="Requests may name streams below it. Repeatable.")
@click.option("--local-root", type=DIRECTORY, multiple=True, help="And local checkpoints below this one. Repeatable.")
@click.option("--token", envvar="GPUSYNC_TOKEN", help="Bearer token of every request; better set in GPUSYNC_TOKEN.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where weights lie."
)
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds after which a step has failed.")
@click.option(
    "--visibility-timeout", type=float, default=60.0, show_default=True, help="Seconds to wait for a version."
)
@click.option("--pre-read-hook", help="pkg.mod.fn or pkg.mod:fn, called with (source_dir, target_version).")
@click.option("--json", "as_json", is_flag=True, help="Print the address as one JSON object, not as text.")
def serve_command(
    *,
    model: Path,
    tp: int,
    host: str,
    port: int,
    source_dir: Path | None,
    local_checkpoint_dir: Path | None,
    source_root: tuple[Path, ...],
    local_root: tuple[Path, ...],
    token: str | None,
    device: str,
    timeout: float,
    visibility_timeout: float,
    pre_read_hook: str | None,
    as_json: bool,
) -> None:
    """Hold weights, and bring them to versions on request.

    Routes: /pull_weights, /prepare_weights, /commit_weights, /abort_weights, /weights/version, /weights/ready,
    /weights/digests, /update_weights_from_disk, /metrics.
    """
    if (source_dir is None) != (local_checkpoint_dir is None):
        raise click.UsageError("--source-dir and --local-checkpoint-dir belong together")
    if source_dir is None and not (source_root and local_root):
        raise click.UsageError("name --source-dir and --local-checkpoint-dir, or --source-root and --local-root")
    missing = [name for name in ("torch", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise click.UsageError(f"serving needs {' and '.join(missing)}: install gpusync with the extra `server`")
    from gpusync.endpoint import Roots
    from gpusync.engines.agent.serve import serve
    from gpusync.engines.agent.settings import AgentSettings, Place

    if token is None and not _is_loopback(host):
        click.echo(f"gpusync: anybody who reaches {host} may update these weights: there is no --token", err=True)
    place, places = None, {}
    if source_dir is not None and local_checkpoint_dir is not None:
        place = Place(source_dir=source_dir.resolve(), local_checkpoint_dir=local_checkpoint_dir.resolve())
        places = {"source_places": (place.source_dir,), "local_places": (place.local_checkpoint_dir,)}

    roots = Roots(source=source_root, local=local_root, **places)
    serve(
        AgentSettings(
            model=model.resolve(),
            tp=tp,
            device=device,
            timeout_s=timeout,
            visibility_timeout_s=visibility_timeout,
            pre_read_hook=pre_read_hook,
        ),
        host=host,
        port=port,
        roots=roots,
        place=place,
        token=token,
        announce=lambda address: click.echo(_announcement(address, model=model, tp=tp, as_json=as_json)),
    )


def _announcement(address: str, *, model: Path, tp: int, as_json: bool) -> str:
    if as_json:
        return json.dumps({"address": address, "model": str(model), "tp": tp})
    return f"serving {model} with {tp} workers at {address}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
