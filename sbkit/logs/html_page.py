"""HTML pages of results and of data: each is one file that loads nothing else."""

import base64
import hashlib
from functools import cache
from importlib.resources import files

import jinja2

from sbkit.base.files import to_json

EMPTY_SECTIONS = {  # the contents of sections that a page leaves out
    "notes": (),
    "clips": {},
    "test": None,
    "sections": (),
    "slices": {},
    "pictures": {},
    "facts": None,
    "data": {"sets": {}, "byWords": True},
}


def render_page(*, title: str, **content: object) -> str:
    """Render a page, leaving out sections without content."""
    style, script = _read("page.css"), _read("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
    )
    values = {"title": title, "policy": policy, "style": style, "code": script}
    return _template().render(EMPTY_SECTIONS | content, **values)


@cache
def _template() -> jinja2.Template:
    """Compile the template, once for the two pages of a run."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sbkit.logs", "pages"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies |= {"json.dumps_function": to_json, "json.dumps_kwargs": {}}
    return environment.get_template("page.html.j2")


def _read(name: str) -> str:
    return files("sbkit.logs").joinpath("pages", name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
