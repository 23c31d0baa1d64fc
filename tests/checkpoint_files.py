"""Checkpoints that are whole and hold nothing, for tests that need only their names."""

from resilience_sdk.checkpoint.manifest import FileEntry, Manifest, encode_manifest, step_name


def leave_checkpoint(run_dir, step):
    """Write one of `step` completed steps below `run_dir`, and return its directory."""
    folder = run_dir / "checkpoints" / step_name(step)
    folder.mkdir(parents=True, mode=0o700)
    (folder / "values.json").touch(mode=0o600)
    manifest = encode_manifest(Manifest(step, 1, (FileEntry("values.json", 0, 0),)))
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "manifest.json").chmod(0o600)
    return folder
