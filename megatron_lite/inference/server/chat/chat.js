// A conversation with the server's model. It lives in this page alone: nothing is stored, and requests go to this server only.
const NUMBERS = ["temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "seed"];
const SHORT = 64;
let turns = [];      // {role, text, images, element}
let images = [];     // {name, uri}: of the next message
let running = null;  // the request whose answer is arriving

const headers = () => {
  const found = { "Content-Type": "application/json" };
  if (at("key").value) found.Authorization = "Bearer " + at("key").value;
  return found;
};
const complain = text => { at("error").textContent = text; at("error").hidden = !text; };

// The models and the card of the first one.
let models = [];
const loadModels = async () => {
  try {
    const response = await fetch("v1/models", { headers: headers() }), found = await response.json();
    if (!response.ok) throw new Error(found.error.message);
    models = found.data;
    at("model").replaceChildren();
    for (const each of models) make("option", at("model"), each.id).value = each.id;
    showModel();
    for (const [name, value] of Object.entries(models[0].meta.sampling)) if (at(name)) at(name).value = value;
    complain("");
  } catch (error) {
    at("settings").open = true;
    complain(error.message);
  }
};
const showModel = () => {
  const model = models.find(each => each.id === at("model").value) ?? models[0], { chat, images: readsImages, sampling, ...facts } = model.meta;
  at("title").textContent = document.title = model.id;
  at("facts").replaceChildren();
  const rows = { ...facts, "longest row, tokens": model.max_model_len.toLocaleString("en"), "chat template": chat ? "yes" : "none", images: readsImages ? "yes" : "none" };
  if (model.parent) rows["adapter of"] = model.parent;
  for (const [name, value] of Object.entries(rows)) { make("dt", at("facts"), name); make("dd", at("facts"), value); }
  at("max_tokens").max = model.max_model_len;
  if (!chat) at("mode").value = "text";
  at("mode").options[0].disabled = !chat;
  showMode();
};
const showMode = () => {
  const chat = at("mode").value === "chat";
  at("system-label").hidden = !chat;
  at("add").hidden = !takesImages();
  at("prompt").placeholder = chat ? "Message" : "A text that the model continues";
};

// The images of the next message: chosen, pasted or dropped. They are data URIs, so that requests can have them.
const takesImages = () => at("mode").value === "chat" && models.some(each => each.meta.images);
const showImages = () => {
  at("images").replaceChildren();
  for (const image of images) {
    const remove = make("button", at("images"));
    remove.type = "button";
    remove.title = `Take out ${image.name}`;
    remove.setAttribute("aria-label", remove.title);
    remove.onclick = () => {
      images = images.filter(each => each !== image);
      showImages();
      at("prompt").focus();
    };
    showImage(remove, image);
  }
  at("prompt").required = images.length === 0;
};
const showImage = (parent, image) => {
  const element = make("img", parent);
  element.src = image.uri;
  element.alt = image.name;
};
const uriOf = file => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});
const addImages = async files => {
  try {
    for (const file of files) {
      if (!file.type.startsWith("image/")) throw new Error(`${file.name} is no image`);
      const uri = await uriOf(file);
      images.push({ name: file.name, uri });
    }
    complain("");
  } catch (error) { complain(error.message); }
  showImages();
};

// What is on the screen.
const NAMES = { user: "You", assistant: "Model" };
const show = (role, text, shown = []) => {
  at("hint").hidden = true;
  const element = make("article", at("log"), undefined, role);
  make("h2", element, NAMES[role]);
  for (const image of shown) showImage(element, image);
  make("p", element, text);
  const turn = { role, text, images: shown, element };
  turns.push(turn);
  return turn;
};
const add = (turn, text) => {
  const log = at("log"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  turn.text += text;
  turn.element.querySelector("p").textContent = turn.text;
  if (follows) log.scrollTop = log.scrollHeight;
};
const drop = turn => { turn.element.remove(); turns = turns.filter(each => each !== turn); };
const showButtons = () => {
  at("send").hidden = running !== null;
  at("stop").hidden = running === null;
  at("again").hidden = running !== null || turns.length === 0;
};
const ENDS = { length: "ended at the longest answer", stopped: "stopped" };
const finish = (turn, end, usage, seconds) => {
  turn.element.classList.remove("running");
  const footer = make("footer", turn.element);
  if (navigator.clipboard) {  // browsers have it for https and for this machine
    const copy = make("button", footer, "Copy");
    copy.type = "button";
    copy.onclick = () => navigator.clipboard.writeText(turn.text);
  }
  const words = [];
  if (usage) words.push(`${usage.completion_tokens} tokens, ${(usage.completion_tokens / seconds).toFixed(1)} tokens/s`);
  if (ENDS[end]) words.push(ENDS[end]);
  footer.append(words.join(" · "));
};

// OpenAI's form of a message: its images come before its text.
const messageOf = turn => {
  const parts = turn.images.map(image => ({ type: "image_url", image_url: { url: image.uri } }));
  if (turn.text) parts.push({ type: "text", text: turn.text });
  return { role: turn.role, content: turn.images.length ? parts : turn.text };
};
const request = () => {
  const body = { model: at("model").value || undefined, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if (at(name).value !== "") body[name] = Number(at(name).value);
  const asked = turns.filter(turn => turn.text || turn.images.length);
  // Without a number, a chat's answer may fill the slot; a continued text ends soon.
  if (at("mode").value === "text" && asked.some(turn => turn.images.length)) throw new Error("a continued text has no images: start a new chat");
  if (at("mode").value === "text") return ["v1/completions", { max_tokens: SHORT, ...body, prompt: asked.map(turn => turn.text).join("") }];
  const messages = asked.map(messageOf);
  if (at("system").value.trim()) messages.unshift({ role: "system", content: at("system").value });
  return ["v1/chat/completions", { ...body, messages }];
};
// Yields the events of a stream until it ends.
async function* events(response) {
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}
const answer = async () => {
  const mine = running = new AbortController(), turn = show("assistant", "");
  turn.element.classList.add("running");
  complain("");
  showButtons();
  const start = performance.now();
  let end = null, usage = null;
  try {
    const [route, body] = request();
    const response = await fetch(route, { method: "POST", headers: headers(), body: JSON.stringify(body), signal: mine.signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      for (const choice of event.choices) {
        add(turn, choice.text ?? choice.delta.content ?? "");
        end = choice.finish_reason ?? end;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") end = "stopped"; else complain(error.message);
  }
  if (running === mine) running = null;
  if (turns.includes(turn)) {
    if (turn.text || end) finish(turn, end, usage, (performance.now() - start) / 1000);
    else { drop(turn); takeBack(turns.at(-1)); }
  }
  showButtons();
};
// A refused message with images goes back into the form: each later request would be refused for it.
const takeBack = turn => {
  if (!turn?.images.length) return;
  drop(turn);
  at("prompt").value ||= turn.text;
  images = [...turn.images, ...images];
  showImages();
};

at("form").onsubmit = event => {
  event.preventDefault();
  if (running || !(at("prompt").value || images.length)) return;
  if (images.length && !takesImages()) return complain("a continued text has no images: take them out, or choose the chat");
  show("user", at("prompt").value, [...images]);
  at("prompt").value = "";
  images = [];
  showImages();
  at("log").scrollTop = at("log").scrollHeight;
  answer();
};
at("prompt").onkeydown = event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("form").requestSubmit();
};
at("add").onclick = () => at("files").click();
at("files").onchange = () => { addImages([...at("files").files]); at("files").value = ""; };
at("prompt").onpaste = event => {
  const { files, types } = event.clipboardData;
  // Programs for tables and slides copy a picture beside their text.
  if (!takesImages() || !files.length || types.includes("text/plain")) return;
  event.preventDefault();
  addImages([...files]);
};
// Otherwise the browser would open a file in place of the page.
const dragsFiles = event => {
  const found = event.dataTransfer.types.includes("Files");
  if (found) event.preventDefault();
  return found;
};
document.ondragover = dragsFiles;
document.ondrop = event => { if (dragsFiles(event) && takesImages()) addImages([...event.dataTransfer.files]); };
at("stop").onclick = () => running?.abort();
at("again").onclick = () => {
  if (turns.at(-1)?.role === "assistant") drop(turns.at(-1));
  if (turns.length) answer();
};
at("new").onclick = () => {
  running?.abort();
  for (const turn of [...turns]) drop(turn);
  images = [];
  showImages();
  at("hint").hidden = false;
  complain("");
  showButtons();
  at("prompt").focus();
};
at("settings-form").onsubmit = event => event.preventDefault();
at("key").onchange = loadModels;
at("model").onchange = showModel;
at("mode").onchange = showMode;
if (innerWidth > 760) at("settings").open = at("card").open = true;
loadModels();
