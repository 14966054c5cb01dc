"""When an utterance of a stream ends: three rules, as Kaldi's online decoder has them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EndpointRules:
    """Seconds after which an utterance ends.

    nothing: of silence where nothing was decoded; silence: after what was decoded; longest: of an
    utterance, whatever it is. Silence is frames whose best token is no speech.
    Source: Kaldi, `online2/online-endpoint.h`; the numbers are sherpa-onnx's.
    """

    nothing: float = 2.4
    silence: float = 1.2
    longest: float = 20.0

    def met(self, *, is_spoken: bool, silence: float, seconds: float) -> str | None:
        """Name the rule by which an utterance ends now, None where it goes on."""
        if silence >= (self.silence if is_spoken else self.nothing):
            return "silence" if is_spoken else "nothing"
        return "longest" if seconds >= self.longest else None
