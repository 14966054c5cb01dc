// The search also finds words that begin with a word of the question, so `a` finds every page.
// Without this, "export a bundle" and "what is a bundle" would find pages with many words in `a`.
const COMMON_WORDS = new Set(
  ("a an and are as at be by can do does for from get have how i in into is it me my need of on or "
    + "own same should that the there this to two use what when where which who why will with")
    .split(" ")
);
const { postMessage } = Worker.prototype;

Worker.prototype.postMessage = function (message, ...options) {
  if (message?.type === 2) {  // a question, in the messages of Material's search
    const words = message.data.split(/\s+/).filter((word) => !COMMON_WORDS.has(word.toLowerCase()));
    message = { ...message, data: words.join(" ") || message.data };
  }
  return postMessage.call(this, message, ...options);
};
