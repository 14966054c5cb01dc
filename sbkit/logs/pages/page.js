// The table of utterances of a report: sort, filter and save it as CSV; hear and see an utterance.
// All text comes from data and is set as text, never as HTML.
"use strict";

const RATE = 16000; // Hz of the audio in a spectrogram
const FFT = 512, WINDOW = 400, HOP = 160; // samples: 25 ms every 10 ms
const RANGE = 70; // dB that are drawn below the loudest bin
const PIXELS_PER_SECOND = 160;
const ROWS = 25; // shown at first

const data = JSON.parse(document.getElementById("data").textContent);
const SPACE = "\u2423", BETWEEN = data.byWords ? " " : ""; // as in `sbkit/evaluate/wer.py`
const get = (id) => document.getElementById(id);
const view = { sort: "errors", down: true, pair: null, rows: ROWS, open: null };

// ---- elements

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// Give a text the direction of its script, even if its words are buttons.
const isolate = (parts) => element("bdi", {}, ...parts);
const percent = (part, whole) => (100 * part) / Math.max(1, whole);
const fixed = (value, digits) => (value === null ? "" : value.toFixed(digits));

// ---- columns

function columnsOf(rows) {
  const columns = [
    { key: "id", title: "Utterance", value: (row) => row.id },
    { key: "errors", title: "Errors", value: (row) => row.errors },
    data.byWords
      ? { key: "words", title: "Words", value: (row) => row.words }
      : { key: "characters", title: "Characters", value: (row) => row.characters },
  ];
  const wer = (row) => percent(row.errors, row.words);
  const cer = (row) => percent(row.character_errors, row.characters);
  if (data.byWords) columns.push({ key: "wer", title: "WER %", value: wer, digits: 0 });
  columns.push({ key: "cer", title: "CER %", value: cer, digits: 0 });
  columns.push({ key: "seconds", title: "Seconds", value: (row) => row.seconds, digits: 1 });
  if (new Set(rows.map((row) => row.speaker)).size > 1) {
    columns.push({ key: "speaker", title: "Speaker", value: (row) => row.speaker });
  }
  return columns;
}

// ---- rows

const allRows = () => data.sets[get("set").value];
const columnNow = () => columnsOf(allRows()).find((column) => column.key === view.sort) ?? columnsOf(allRows())[0];

function selectedRows() {
  const query = get("search").value.trim().toLowerCase();
  const rows = allRows().filter((row) => {
    if (get("wrong").checked && !row.errors) return false;
    if (get("audible").checked && !row.clip) return false;
    if (view.pair && !alignedWords(row).some(isPair)) return false;
    const texts = [row.id, row.reference, row.hypothesis, row.speaker];
    return !query || texts.some((text) => text.toLowerCase().includes(query));
  });
  const { value } = columnNow();
  const sign = view.down ? -1 : 1;
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
  return rows.sort((a, b) => sign * compare(value(a) ?? -1, value(b) ?? -1));
}

const isPair = (word) => word.mark !== "=" && word.said === view.pair.said && word.heard === view.pair.heard;

// Split a text into the aligned units: words, or characters in a language without spaces.
function split(text) {
  const words = text.split(/\s+/).filter(Boolean);
  return data.byWords ? words : [...words.join(SPACE)];
}

// The aligned units of a row: {mark, said, heard, index}. The index is that of the word in the
// hypothesis, and so of its times; characters of one word share it.
function alignedWords(row) {
  const said = split(row.reference), heard = split(row.hypothesis);
  let i = 0, j = 0, spaces = 0;
  return [...row.marks].map((mark) => {
    const word = { mark, said: mark === "I" ? "" : said[i++], heard: mark === "D" ? "" : heard[j] };
    word.index = mark === "D" ? null : data.byWords ? j : spaces;
    if (mark !== "D" && heard[j++] === SPACE) spaces++;
    return word;
  });
}

// The words of the hypothesis; a word is right if all its aligned units are.
function recognizedWords(row) {
  const words = [];
  for (const { mark, heard, index } of alignedWords(row)) {
    if (index === null || heard === SPACE) continue;
    words[index] ??= { heard: "", mark: "=", index };
    words[index].heard += heard;
    if (mark !== "=") words[index].mark = mark;
  }
  return words;
}

// ---- the table

function showHead() {
  const cells = columnsOf(allRows()).map((column) => {
    const button = element("button", { type: "button" }, column.title);
    button.addEventListener("click", () => {
      view.down = view.sort === column.key ? !view.down : !["id", "speaker"].includes(column.key);
      view.sort = column.key;
      show();
    });
    const cell = element("th", { className: column.key === "id" || column.key === "speaker" ? "" : "number" }, button);
    if (column.key === view.sort) cell.setAttribute("aria-sort", view.down ? "descending" : "ascending");
    return cell;
  });
  get("table").tHead.replaceChildren(element("tr", {}, ...cells));
}

function show() {
  const rows = selectedRows();
  const total = allRows().length;
  showHead();
  get("table").tBodies[0].replaceChildren(...rows.slice(0, view.rows).flatMap(rowElements));
  get("count").textContent = rows.length === total ? `${total} utterances.` : `${rows.length} of ${total} utterances.`;
  get("more").hidden = rows.length <= view.rows;
  get("pair").hidden = !view.pair;
  if (view.pair) get("pair").textContent = `only ${view.pair.said || "inserted"} → ${view.pair.heard || "deleted"} ✕`;
  for (const note of document.querySelectorAll(".of-set")) note.hidden = note.dataset.set !== get("set").value;
}

function rowElements(row) {
  const words = alignedWords(row).flatMap((word) => [...wordElements(word, row, null), BETWEEN]);
  const button = element("button", { type: "button", className: "open" }, element("span", { className: "id" }, row.id), element("div", { className: "text" }, isolate(words)));
  button.setAttribute("aria-expanded", view.open === row.id);
  const cells = columnsOf(allRows()).slice(1).map((column) => {
    const value = column.value(row);
    const text = typeof value === "number" && column.digits !== undefined ? fixed(value, column.digits) : String(value ?? "");
    const cell = element("td", { className: column.key === "speaker" ? "" : "number" }, text);
    cell.dataset.title = column.title.replace(/^[A-Z](?=[a-z])/, (first) => first.toLowerCase());
    return cell;
  });
  const line = element("tr", {}, element("td", {}, button), ...cells);
  button.addEventListener("click", () => {
    view.open = view.open === row.id ? null : row.id;
    show();
  });
  return view.open === row.id ? [line, details(row, cells.length + 1)] : [line];
}

// The reference of a wrong word, and the recognized word: a button if `play` is a function.
function wordElements(word, row, play) {
  const nodes = [];
  if (word.said && word.mark !== "=") nodes.push(element("del", {}, word.said));
  if (!word.heard) return nodes;
  const time = row.heard?.[word.index];
  const inner = element(play && time ? "button" : "span", {}, word.mark === "=" ? word.heard.replace(SPACE, " ") : word.heard);
  markConfidence(inner, time);
  if (play && time) {
    inner.type = "button";
    inner.title = describeTime(time);
    inner.addEventListener("click", () => play(time[0], time[1]));
  }
  if (nodes.length) nodes.push(BETWEEN);
  nodes.push(word.mark === "=" ? inner : element("ins", {}, inner));
  return nodes;
}

const describeTime = ([start, end, confidence]) =>
  `${start.toFixed(2)} to ${end.toFixed(2)} s` + (confidence === null ? "" : `, confidence ${confidence.toFixed(2)}`);

function markConfidence(node, time) {
  if (!time || time[2] === null) return;
  node.classList.add("doubt");
  node.style.setProperty("--doubt", (1 - time[2]).toFixed(2));
}

// ---- one utterance: its audio, its spectrogram, its words

function details(row, columns) {
  const cell = element("td", { colSpan: columns });
  const player = row.clip ? addPlayer(cell, row) : null;
  if (!row.clip) cell.append(element("p", { className: "quiet" }, "The audio of this utterance is not in the page."));
  const words = alignedWords(row).flatMap((word) => [...wordElements(word, row, player), BETWEEN]);
  cell.append(element("div", { className: "spoken" }, isolate(words)));
  const facts = [row.speaker && `speaker ${row.speaker}`, row.seconds !== null && `${row.seconds.toFixed(2)} s`];
  cell.append(element("div", { className: "quiet" }, "reference: ", isolate([row.reference]), ...facts.filter(Boolean).map((fact) => " · " + fact)));
  if (row.greedy !== null) cell.append(element("div", { className: "quiet" }, "greedy: ", isolate([row.greedy])));
  return element("tr", { className: "details" }, cell);
}

// Add the player and the spectrogram; return a function that plays from one time to another.
function addPlayer(cell, row) {
  const audio = element("audio", { controls: true, preload: "auto", src: `data:audio/mpeg;base64,${row.clip}` });
  const canvas = element("canvas"), playhead = element("div", { className: "playhead" });
  const stage = element("div", { className: "stage" }, canvas);
  let until = Infinity;
  const play = (start, end) => {
    until = end;
    audio.currentTime = start;
    audio.play().catch(() => {}); // a browser may ask for a click first; the controls are there
    requestAnimationFrame(follow);
  };
  const follow = () => {
    playhead.style.left = `${(100 * audio.currentTime) / (audio.duration || row.seconds || 1)}%`;
    if (audio.currentTime >= until) audio.pause();
    if (!audio.paused) requestAnimationFrame(follow);
    else until = Infinity;
  };
  audio.addEventListener("play", () => requestAnimationFrame(follow));
  audio.addEventListener("seeked", follow);
  cell.append(audio, element("div", { className: "scroll" }, stage));
  drawSpectrogram(canvas, row.clip).then((seconds) => {
    stage.style.width = `${seconds * PIXELS_PER_SECOND}px`;
    canvas.addEventListener("click", (event) => play((event.offsetX / canvas.clientWidth) * seconds, Infinity));
    if (row.heard) stage.append(lane(row, seconds, play));
    stage.append(playhead);
    if (row.seconds > seconds + 0.1) cell.append(element("p", { className: "quiet" }, `The page has its first ${Math.round(seconds)} seconds.`));
  }).catch(() => stage.replaceWith("This browser cannot draw the audio."));
  return play;
}

function lane(row, seconds, play) {
  const node = element("div", { className: "lane" });
  for (const word of recognizedWords(row)) {
    const time = row.heard[word.index];
    if (!time || time[0] >= seconds) continue;
    const button = element("button", { type: "button", title: `${word.heard}: ${describeTime(time)}` }, word.heard);
    if (word.mark !== "=") button.classList.add("error");
    markConfidence(button, time);
    button.style.left = `${(100 * time[0]) / seconds}%`;
    button.style.width = `${(100 * (time[1] - time[0])) / seconds}%`;
    button.addEventListener("click", () => play(time[0], time[1]));
    node.append(button);
  }
  return node;
}

// ---- the spectrogram

async function drawSpectrogram(canvas, clip) {
  const bytes = Uint8Array.from(atob(clip), (character) => character.charCodeAt(0));
  const audio = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(bytes.buffer);
  const levels = spectrogram(audio.getChannelData(0));
  const bins = FFT / 2;
  canvas.width = levels.length;
  canvas.height = bins;
  const context = canvas.getContext("2d");
  const image = context.createImageData(levels.length, bins);
  const colors = getComputedStyle(document.documentElement).getPropertyValue("--spectrum").split(",").map((color) => color.trim().split(" ").map(Number));
  const loudest = levels.reduce((level, frame) => Math.max(level, ...frame), -Infinity);
  levels.forEach((frame, x) => frame.forEach((level, bin) => {
    const share = Math.max(0, 1 + (level - loudest) / RANGE);
    image.data.set([...mix(colors, share), 255], 4 * ((bins - 1 - bin) * levels.length + x));
  }));
  context.putImageData(image, 0, 0);
  return audio.duration;
}

function mix(colors, share) {
  const position = Math.min(share, 0.9999) * (colors.length - 1), first = Math.floor(position);
  return colors[first].map((value, i) => value + (position - first) * (colors[first + 1][i] - value));
}

// The power of each bin in dB, for every frame.
function spectrogram(samples) {
  const window = Float64Array.from({ length: WINDOW }, (_, n) => 0.5 - 0.5 * Math.cos((2 * Math.PI * n) / WINDOW));
  const frames = [];
  for (let start = 0; start === 0 || start + WINDOW <= samples.length; start += HOP) {
    const real = new Float64Array(FFT), imaginary = new Float64Array(FFT);
    for (let n = 0; n < WINDOW && start + n < samples.length; n++) real[n] = window[n] * samples[start + n];
    transform(real, imaginary);
    frames.push(Float32Array.from({ length: FFT / 2 }, (_, bin) => 10 * Math.log10(real[bin] ** 2 + imaginary[bin] ** 2 + 1e-10)));
  }
  return frames;
}

// The discrete Fourier transform in place, by radix 2 (Cooley and Tukey, 1965).
function transform(real, imaginary) {
  const count = real.length;
  for (let i = 1, j = 0; i < count; i++) {
    let bit = count >> 1;
    for (; j & bit; bit >>= 1) j ^= bit;
    j ^= bit;
    if (i < j) {
      [real[i], real[j]] = [real[j], real[i]];
      [imaginary[i], imaginary[j]] = [imaginary[j], imaginary[i]];
    }
  }
  for (let size = 2; size <= count; size *= 2) {
    for (let k = 0; k < size / 2; k++) {
      const angle = (-2 * Math.PI * k) / size, cosine = Math.cos(angle), sine = Math.sin(angle);
      for (let even = k; even < count; even += size) {
        const odd = even + size / 2;
        const x = real[odd] * cosine - imaginary[odd] * sine, y = real[odd] * sine + imaginary[odd] * cosine;
        real[odd] = real[even] - x;
        imaginary[odd] = imaginary[even] - y;
        real[even] += x;
        imaginary[even] += y;
      }
    }
  }
}

// ---- CSV

function toCsv(rows) {
  const heads = ["id", "reference", "hypothesis", ...(data.byWords ? ["word_errors"] : []), "character_errors"];
  heads.push(...(data.byWords ? ["words"] : []), "characters", "seconds", "speaker");
  const lines = rows.map((row) => [
    row.id, row.reference, row.hypothesis, ...(data.byWords ? [row.errors] : []), row.character_errors,
    ...(data.byWords ? [row.words] : []), row.characters, row.seconds ?? "", row.speaker,
  ]);
  return [heads, ...lines].map((line) => line.map(csvCell).join(",") + "\r\n").join("");
}

// Put an apostrophe before a text that a spreadsheet would compute as a formula.
function csvCell(value) {
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function saveCsv() {
  const url = URL.createObjectURL(new Blob([toCsv(selectedRows())], { type: "text/csv" }));
  element("a", { href: url, download: `utterances_${get("set").value}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// ---- start

function start() {
  const restart = () => {
    view.rows = ROWS;
    show();
  };
  for (const id of ["set", "search", "wrong", "audible"]) get(id).addEventListener("input", restart);
  get("set").form.addEventListener("submit", (event) => event.preventDefault());
  get("csv").addEventListener("click", saveCsv);
  get("more").addEventListener("click", () => {
    view.rows += 4 * ROWS;
    show();
  });
  get("pair").addEventListener("click", () => {
    view.pair = null;
    restart();
  });
  for (const button of document.querySelectorAll(".confusion")) {
    button.addEventListener("click", () => {
      get("set").value = button.dataset.set;
      view.pair = { said: button.dataset.said, heard: button.dataset.heard };
      restart();
      get("utterances").scrollIntoView();
    });
  }
  show();
}

if (Object.keys(data.sets).length) start();
