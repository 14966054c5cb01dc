from tests.serve.server import served
from time import sleep
import httpx2
def test_it(tmp_path):
    with served(tmp_path) as s:
        while httpx2.get(s.url+"/health/ready").status_code==503: sleep(0.01)
        print(httpx2.get(s.url+"/health/ready").text)
        audio = s.say("the quick brown fox")
        for fmt in "json text srt vtt verbose_json".split():
            r = s.openai.audio.transcriptions.create(model="tones", file=("x.wav", audio), response_format=fmt, **({"timestamp_granularities":["word","segment"]} if "v" in fmt and "j" in fmt else {}))
            print(repr(r))
        for e in s.openai.audio.transcriptions.create(model="whisper-1", file=("x.wav", audio), stream=True): print(e)
        print(s.openai.models.list(), s.openai.models.retrieve("tones"))
        print(s.post(b"hello").text, s.post(None).text, s.post(audio[:300]).text)
        print(httpx2.get(s.url+"/nowhere").text)
        print(httpx2.get(s.url+"/metrics").text)
