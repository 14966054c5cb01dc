from language_id import LanguageIdentification, LanguageModel

from sbkit.bundle.task import Graph


class GraphModel(LanguageModel):
    settings = {"unit": "nats"}

    def identify(self, audio, audio_lengths):
        return self.predict(32768 * audio, audio_lengths)


class WithGraph(LanguageIdentification):
    graphs = {
        "identify": Graph(
            inputs=("audio", "audio_lengths"),
            outputs=("log_probs",),
            arguments=lambda run, audio, lengths: (audio, lengths),
        )
    }

    def model_class(self):
        return GraphModel
