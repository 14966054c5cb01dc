"""HTML pages that hold all they need: one file each, which asks nobody for anything.

What comes from data is escaped by jinja2, and a policy (CSP) forbids every request and every script
and style but the two of sbkit, which it names by their SHA-256.
"""

import base64
import hashlib
from importlib.resources import files

import jinja2

from sbkit.base.files import to_json

FOLDER = "pages"  # of the templates, beside this file


def render_page(template: str, *, script: str | None = None, **content: object) -> str:
    """Fill in a template; ``script`` names the file of its JavaScript, where it has any."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sbkit.logs", FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies |= {"json.dumps_function": to_json, "json.dumps_kwargs": {}}
    style, code = _read("page.css"), _read(script) if script else ""
    policy = {
        "default-src": "'none'",
        "style-src": _hash(style),
        "script-src": _hash(code) if code else "'none'",
        "img-src": "data:",
        "media-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return environment.get_template(template).render(
        policy="; ".join(f"{name} {value}" for name, value in policy.items()),
        style=style,
        code=code,
        **content,
    )


def _read(name: str) -> str:
    return files("sbkit.logs").joinpath(FOLDER, name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
