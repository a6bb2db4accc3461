"use strict";
// Everything that a document, an answer or a server says is put on the page as text, never as HTML.

const LEAST = 512, MOST = 4096, SOON_MS = 2000; // tokens that are read at once; quick pieces grow
const MOST_FILE = 8000000, MAX_TOKENS = 200, PASSAGES = 8, LEVELS = 5;
const BLOCKS = // elements of HTML that begin a line, and end one
  "address, article, aside, blockquote, br, caption, dd, div, dl, dt, figcaption, footer, form, h1, h2, " +
  "h3, h4, h5, h6, header, hr, li, main, nav, ol, option, p, pre, section, table, td, th, tr, ul";
const at = (id) => document.getElementById(id);
const state = {
  key: "", model: "", options: null, document: null, turns: [], shown: null,
  read: null, answer: null, // what is under way: it can be aborted
};

class HttpError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function call(path, { method = "GET", body, signal, stream = false } = {}) {
  const headers = { "Content-Type": "application/json" };
  if (state.key) headers.Authorization = `Bearer ${state.key}`;
  const data = body === undefined ? undefined : JSON.stringify(body);
  const answer = await fetch(path, { method, headers, body: data, signal }).catch(unreachable);
  if (!answer.ok) throw new HttpError(answer.status, await reason(answer));
  return stream ? answer : answer.json();
}

function unreachable(error) {
  throw error.name === "AbortError" ? error : new Error(`The server does not answer (${error.message}).`);
}

async function reason(answer) {
  const text = await answer.text();
  try {
    const said = JSON.parse(text);
    return String(said.error?.message ?? said.detail ?? said.error ?? text);
  } catch {
    return `${answer.status} ${text}`.slice(0, 500);
  }
}

function element(name, text = "", parts = {}) {
  const made = Object.assign(document.createElement(name), parts);
  if (text) made.textContent = text;
  return made;
}

function complain(error) {
  if (error?.name === "AbortError") return;
  at("error").textContent = error ? error.message : "";
  at("error").hidden = !error;
}

function ready() {
  at("send").disabled = Boolean(state.read || state.answer);
}

const guarded = (act) => async (event) => {
  event?.preventDefault?.();
  complain(null);
  try {
    await act(event);
  } catch (error) {
    complain(error);
  }
};

async function enter() {
  try {
    state.options = await call("/v1/kv_retrieval/options");
  } catch (error) {
    if (error.status !== 401) throw error;
    at("login").hidden = false;
    if (state.key) throw new Error("The server has another API key.");
    return;
  }
  at("login").hidden = true;
  at("main").hidden = false;
  state.model = (await call("/v1/models")).data[0].id;
  const { budget, most, exact, may, stored } = state.options;
  const kept = stored ? "documents are kept in its store" : "documents are kept until it ends";
  at("model").textContent = `${state.model}; ${kept}`;
  const least = Math.min(128, most);
  Object.assign(at("budget"), { min: least, max: most, step: least, value: budget });
  at("beside").disabled = !exact;
  at("budget").disabled = !may.includes("budget");
  showBudget();
  await listDocuments();
}

function showBudget() {
  at("tokens").textContent = `${Number(at("budget").value).toLocaleString("en")} tokens`;
}

async function listDocuments() {
  const rows = (await call("/v1/kv_retrieval/documents")).map(({ id, name }) => {
    const row = element("li");
    const open = element("button", name, { type: "button" });
    open.onclick = guarded(() => choose(id));
    if (state.document?.id === id) open.setAttribute("aria-current", "true");
    const forget = element("button", "×", { type: "button", title: `Forget ${name}` });
    forget.ariaLabel = forget.title;
    forget.onclick = guarded(() => remove(id));
    row.append(open, forget);
    return row;
  });
  at("documents").replaceChildren(...rows);
}

async function remove(id) {
  await call(`/v1/kv_retrieval/documents/${id}`, { method: "DELETE" });
  await listDocuments();
}

async function addFile() {
  const [file] = at("file").files;
  if (!file) return;
  at("file").value = ""; // so that the same file can be named again
  if (file.size > MOST_FILE) throw new Error(`${file.name} has more than ${MOST_FILE / 1e6} MB.`);
  let text = decoded(await file.arrayBuffer());
  if (text === null) {
    throw new Error(
      `${file.name} is not text in UTF-8 or UTF-16. Save it as text in UTF-8; of a PDF or another ` +
        "encoding take the text by: vllm-kvretrieval chat FILE --page.",
    );
  }
  if (/\.html?$/i.test(file.name)) {
    const parsed = new DOMParser().parseFromString(text, "text/html"); // runs and loads nothing
    parsed.querySelectorAll("script, style, template, noscript, svg").forEach((part) => part.remove());
    parsed.querySelectorAll(BLOCKS).forEach((part) => (part.before("\n"), part.after("\n")));
    text = parsed.body.textContent.replace(/[ \t]+/g, " ").replace(/\s*\n\s*/g, "\n").trim();
  }
  if (!text.trim()) throw new Error(`${file.name} has no text.`);
  const body = { name: file.name.slice(0, 200), text };
  const { id } = await call("/v1/kv_retrieval/documents", { method: "POST", body });
  await choose(id);
}

// The text of a file, by the mark that it begins with, or in UTF-8; null: it is none.
function decoded(bytes) {
  const [first, second] = new Uint8Array(bytes);
  const mark = { 0xfffe: "utf-16le", 0xfeff: "utf-16be" }[(first << 8) | second];
  try {
    const text = new TextDecoder(mark ?? "utf-8", { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

async function choose(id) {
  state.read?.abort();
  state.answer?.abort();
  const found = await call(`/v1/kv_retrieval/documents/${id}`);
  Object.assign(state, { document: { ...found, id }, turns: [], shown: null });
  at("name").textContent = found.name;
  at("reader").hidden = at("chat").hidden = false;
  at("legend").hidden = true;
  at("answers").replaceChildren();
  show([]);
  await listDocuments();
  await read();
}

// As `vllm-kvretrieval chat` begins a chat, so that both find what the other has let the server read.
const introduction = () => `Answer by this document.\n\n${state.document.text}\n\n`;
const asked = (question) => [{ role: "user", content: introduction() + question }];

function messages(question) {
  const [first, ...others] = state.turns.flatMap((turn) => [
    { role: "user", content: turn.question },
    { role: "assistant", content: turn.answer },
  ]);
  if (!first) return asked(question);
  return [...asked(first.content), ...others, { role: "user", content: question }];
}

async function tokenized(chat) {
  return call("/tokenize", { method: "POST", body: { model: state.model, messages: chat } });
}

async function read() {
  const control = (state.read = new AbortController());
  const { signal } = control;
  ready();
  at("stop").hidden = false;
  at("far").textContent = "counting tokens";
  at("bar").removeAttribute("value");
  try {
    const [one, other] = [await tokenized(asked("What")), await tokenized(asked("1?"))];
    const end = one.tokens.findIndex((token, i) => token !== other.tokens[i]);
    if (one.count + MAX_TOKENS > one.max_model_len) {
      throw new Error(
        `${state.document.name} has ${one.count} tokens, and the server reads ` +
          `${one.max_model_len}, less ${MAX_TOKENS} for an answer.`,
      );
    }
    state.document.tokens = end;
    let done = 0, size = LEAST, computed = 0, spent = 0;
    while (done < end) {
      const next = Math.min(done + size, end), began = performance.now();
      const prompt = one.tokens.slice(0, next);
      const body = { model: state.model, prompt, max_tokens: 1, temperature: 0 };
      const told = await call("/v1/completions", { method: "POST", body, signal });
      const took = performance.now() - began;
      if ((told.usage?.prompt_tokens_details?.cached_tokens ?? 0) > done) {
        size *= 4;
      } else {
        computed += next - done;
        spent += took;
        size = took < SOON_MS ? Math.min(2 * size, MOST) : Math.max(LEAST, Math.min(size, MOST) / 2);
      }
      done = next;
      if (state.read !== control) return;
      far(done, end, computed && ((end - done) * spent) / computed);
    }
  } catch (error) {
    if (state.read === control) {
      at("bar").value = at("bar").value; // it no longer moves
      at("far").textContent = signal.aborted ? "stopped; what was read is kept" : "not read";
    }
    throw error;
  } finally {
    if (state.read === control) {
      state.read = null;
      at("stop").hidden = true;
      ready();
    }
  }
}

function far(done, end, left) {
  Object.assign(at("bar"), { value: done, max: end });
  const rest = left ? `, about ${Math.ceil(left / 1000)} s left` : "";
  const number = (n) => n.toLocaleString("en");
  at("far").textContent = `${number(done)} of ${number(end)} tokens read${rest}`;
}

async function ask() {
  const question = at("question").value.trim();
  const budget = Number(at("budget").value);
  const control = (state.answer = new AbortController());
  ready();
  try {
    await answerAll(question, budget, control.signal);
  } finally {
    if (state.answer === control) state.answer = null;
    ready();
  }
}

async function answerAll(question, budget, signal) {
  let chat = messages(question);
  for (; state.turns.length; chat = messages(question)) {
    const { count, max_model_len } = await tokenized(chat);
    if (count + MAX_TOKENS <= max_model_len) break;
    state.turns.shift();
  }
  const turn = element("div", "", { className: "turn" });
  const pair = element("div", "", { className: "pair" });
  turn.append(element("p", question), pair);
  at("answers").prepend(turn);
  const own = at("budget").disabled ? {} : { kv_retrieval_budget: budget };
  const ways = [[`budget ${budget.toLocaleString("en")}`, own]];
  if (at("beside").checked) ways.push(["full attention", { kv_retrieval_exact: true }]);
  const cards = ways.map(([name]) => card(name));
  pair.append(...cards.map(({ box }) => box));
  let first = null;
  for (const [i, [name, options]] of ways.entries()) {
    const reply = await answer(chat, options, cards[i], signal);
    reply.name = name;
    first ??= reply;
    if (!tells()) continue;
    await sources(chat, reply, cards[i], signal);
    signal.throwIfAborted();
    if (i === 0) display(reply);
  }
  signal.throwIfAborted(); // another document is open
  state.turns.push({ question, answer: first.text });
  at("question").value = "";
}

const tells = () => state.options.may.includes("sources");

function card(name) {
  const made = { box: element("div", "", { className: "answer" }), head: element("h3", name) };
  made.text = element("div", "", { className: "text" });
  made.list = element("ol");
  made.box.append(made.head, made.text, made.list);
  return made;
}

async function answer(chat, options, { head, text }, signal) {
  const body = {
    model: state.model, messages: chat, max_tokens: MAX_TOKENS, temperature: 0, stream: true,
    stream_options: { include_usage: true },
    vllm_xargs: { ...options, ...(tells() && { kv_retrieval_sources: true }) },
  };
  const began = performance.now();
  const stream = await call("/v1/chat/completions", { method: "POST", body, signal, stream: true });
  const reply = { id: "", text: "" };
  let first = 0, last = 0, tokens = 0;
  for await (const chunk of events(stream.body)) {
    if (chunk.error) throw new Error(String(chunk.error.message ?? chunk.error));
    reply.id = chunk.id;
    tokens = chunk.usage?.completion_tokens ?? tokens;
    const piece = chunk.choices?.[0]?.delta?.content;
    if (!piece) continue;
    last = performance.now() - began;
    first ||= last;
    reply.text += piece;
    text.textContent = reply.text;
  }
  const each = (last - first) / Math.max(tokens - 1, 1);
  head.textContent += `: first token ${(first / 1000).toFixed(2)} s, then ${each.toFixed(0)} ms each`;
  return reply;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(unreachable);
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data: ") ? line.slice(6) : "[DONE]";
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function sources(chat, reply, { list, box }, signal) {
  const told = await call(`/v1/kv_retrieval/sources/${encodeURIComponent(reply.id)}`, { signal });
  const tokens = (await tokenized(chat)).tokens.slice(0, state.document.tokens);
  // What a model attends to at each step, whatever it writes, is not prominent.
  const prominent = told.peaks.map((group, i) => {
    return group.map((peak, page) => (told.steps > 1 ? peak - told.weights[i][page] : peak));
  });
  const mean = prominent[0].map((_, page) => {
    return prominent.reduce((sum, group) => sum + group[page], 0) / prominent.length;
  });
  reply.groups = [{ name: "all", weights: mean }];
  told.groups.forEach(([begin, end], i) => {
    reply.groups.push({ name: `${begin} to ${end}`, weights: prominent[i] });
  });
  for (const group of reply.groups) {
    group.passages = [];
    for (const [begin, end] of stretches(group.weights, tokens.length / told.page_size)) {
      const part = tokens.slice(begin * told.page_size, end * told.page_size);
      const body = { model: state.model, tokens: part };
      const { prompt } = await call("/detokenize", { method: "POST", body, signal });
      const text = prompt.replace(/^\ufffd+|\ufffd+$/g, "");
      const place = nearest(text, (begin * told.page_size) / tokens.length);
      const weight = Math.max(...group.weights.slice(begin, end));
      if (place >= 0 && text.trim()) group.passages.push({ place, text, weight });
    }
  }
  const whole = reply.groups[0].passages.toSorted((a, b) => b.weight - a.weight);
  list.replaceChildren(
    ...whole.slice(0, 5).map((passage) => {
      const row = element("li");
      const link = element("button", `${where(passage.place)}: ${passage.text.trim()}`, { type: "button" });
      link.onclick = () => display(reply, passage);
      row.append(link);
      return row;
    }),
  );
  box.onclick = (event) => event.target.closest("button") || display(reply);
}

// The pages with the largest weights, neighbours together. All models attend to the first one.
function stretches(weights, pages) {
  const numbers = weights.map((_, page) => page).slice(1, Math.floor(pages));
  const best = numbers.toSorted((a, b) => weights[b] - weights[a]).slice(0, PASSAGES);
  const found = [];
  for (const page of best.sort((a, b) => a - b)) {
    if (found.at(-1)?.[1] === page) found.at(-1)[1] += 1;
    else found.push([page, page + 1]);
  }
  return found;
}

function nearest(text, part) {
  const { text: whole } = state.document;
  let best = -1;
  if (!text) return best;
  for (let place = whole.indexOf(text); place >= 0; place = whole.indexOf(text, place + 1)) {
    const closer = Math.abs(place - part * whole.length) < Math.abs(best - part * whole.length);
    if (best < 0 || closer) best = place;
  }
  return best;
}

function where(place) {
  const { pages, text } = state.document;
  const page = pages.filter((begin) => begin <= place).length;
  return page ? `page ${page}` : `${Math.round((100 * place) / text.length)} % of the text`;
}

function display(reply, here = null) {
  const keep = state.shown === reply ? at("group").value : "0";
  state.shown = reply;
  at("whose").textContent = `What the answer attended to (${reply.name})`;
  const choices = reply.groups.map(({ name }, i) => element("option", name, { value: String(i) }));
  at("group").replaceChildren(...choices);
  at("group").value = here ? "0" : keep;
  at("legend").hidden = false;
  show(reply.groups[Number(at("group").value)].passages, here);
}

function show(passages, here = null) {
  const { text } = state.document;
  const most = Math.max(...passages.map(({ weight }) => weight), 0);
  const parts = [];
  let end = 0;
  for (const passage of passages.toSorted((a, b) => a.place - b.place)) {
    if (passage.place < end) continue;
    const level = Math.max(1, Math.ceil((LEVELS * passage.weight) / most));
    const mark = element("mark", passage.text, { className: `w${level}` });
    mark.title = `${(100 * passage.weight).toFixed(1)} % more of a head's attention than on average`;
    if (here?.place === passage.place) mark.classList.add("here");
    parts.push(text.slice(end, passage.place), mark);
    end = passage.place + passage.text.length;
  }
  at("text").replaceChildren(...parts, text.slice(end));
  const target = at("text").querySelector(".here") ?? at("text").querySelector(`.w${LEVELS}`);
  if (here) target?.scrollIntoView({ block: "center" });
  else if (target) scrollWithin(at("text"), target); // a narrow window stays at the answer
}

function scrollWithin(box, target) {
  const distance = target.getBoundingClientRect().top - box.getBoundingClientRect().top;
  box.scrollTop += distance - box.clientHeight / 2;
}

addEventListener("DOMContentLoaded", () => {
  state.key = location.hash.slice(1); // is sent to no server
  try {
    state.key = decodeURIComponent(state.key);
  } catch {
    // It is none of ours; the server says so.
  }
  history.replaceState(null, "", location.pathname);
  at("login").onsubmit = guarded(() => {
    state.key = at("key").value.trim();
    return enter();
  });
  at("file").onchange = guarded(addFile);
  at("budget").oninput = showBudget;
  at("group").onchange = () => display(state.shown);
  at("stop").onclick = () => state.read?.abort();
  at("ask").onsubmit = guarded(ask);
  guarded(enter)();
});
