"""Build the source distribution and the wheel of the tracked files, with the same bytes each time.

python -m tools.build --out dist

Setuptools copies the permissions of files and, into a source distribution, the current time. So the
files are copied with normal permissions first, and the archive is rewritten with the commit's time.
"""

import argparse
import gzip
import os
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Build into the folder that the command line names."""
    os.umask(0o022)  # for the files that setuptools creates
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("dist"))
    build(parser.parse_args().out)


def build(out: Path) -> None:
    """Build sbkit-VERSION.tar.gz and, from it, sbkit-VERSION-py3-none-any.whl."""
    git = ("git", "-C", str(ROOT))
    time = subprocess.check_output([*git, "log", "-1", "--format=%ct"], text=True).strip()
    names = subprocess.check_output([*git, "ls-files", "-z"], text=True).split("\0")[:-1]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": time}
    out = out.resolve()
    with TemporaryDirectory() as folder:
        source = Path(folder)
        for name in names:
            copy = source / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy)
            copy.chmod(0o755 if os.access(ROOT / name, os.X_OK) else 0o644)
        command = [sys.executable, "-m", "build", "--outdir", str(out)]
        subprocess.run([*command, "--sdist", source], check=True, env=environment)
        (archive,) = out.glob("*.tar.gz")
        rewrite(archive, int(time))
        (source / "unpacked").mkdir()
        subprocess.run(["tar", "-xzf", archive, "-C", source / "unpacked"], check=True)
        (unpacked,) = (source / "unpacked").iterdir()
        subprocess.run([*command, "--wheel", unpacked], check=True, env=environment)


def rewrite(archive: Path, time: int) -> None:
    """Rewrite a .tar.gz with sorted members that have no user and the same time."""
    content = BytesIO()
    with tarfile.open(archive) as old, tarfile.open(fileobj=content, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            info = tarfile.TarInfo(member.name)
            info.size = member.size
            info.mtime = time
            info.type = member.type
            info.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(info, old.extractfile(member) if member.isfile() else None)
    archive.write_bytes(gzip.compress(content.getvalue(), mtime=time))


if __name__ == "__main__":
    main()
