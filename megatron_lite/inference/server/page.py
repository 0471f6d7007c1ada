"""A web page to try a model: one form that shows the answer as it is generated."""

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The page's content security policy: it may only send requests to this server."""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>megatron-lite</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
  textarea, input { font: inherit; box-sizing: border-box }
  textarea { width: 100%; height: 8rem }
  input { width: 6rem }
  label { margin-right: 1rem }
  #answer { white-space: pre-wrap; margin-top: 1rem }
  #error { color: #a00 }
</style>
<h1 id="model">megatron-lite</h1>
<form id="form">
  <textarea id="prompt" aria-label="Prompt" required autofocus></textarea>
  <p>
    <label>tokens <input id="tokens" type="number" min="1" value="64"></label>
    <label>temperature <input id="temperature" type="number" min="0" step="0.1" value="0.8"></label>
    <label>key <input id="key" type="password" autocomplete="off"></label>
    <button>Continue</button> <button type="button" id="stop" disabled>Stop</button>
  </p>
</form>
<div id="answer" aria-live="polite"></div>
<div id="error" role="alert"></div>
<script>
const at = id => document.getElementById(id);
let running = null;
at("stop").onclick = () => running && running.abort();
at("form").onsubmit = async event => {
  event.preventDefault();
  if (running) running.abort();
  const mine = running = new AbortController();
  at("error").textContent = "";
  at("answer").textContent = at("prompt").value;
  at("stop").disabled = false;
  const headers = {"Content-Type": "application/json"};
  if (at("key").value) headers.Authorization = "Bearer " + at("key").value;
  try {
    const body = JSON.stringify({
      prompt: at("prompt").value, max_tokens: +at("tokens").value, temperature: +at("temperature").value, stream: true,
    });
    const response = await fetch("v1/completions", {method: "POST", headers, body, signal: mine.signal});
    if (!response.ok) throw new Error((await response.json()).error.message);
    let rest = "";
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const {value, done} = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\\n\\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "data: [DONE]") continue;
        const part = JSON.parse(line.slice(6));
        if (part.error) throw new Error(part.error.message);
        if (part.choices.length) at("answer").textContent += part.choices[0].text;
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") at("error").textContent = error.message;
  }
  if (running === mine) { running = null; at("stop").disabled = true; }
};
</script>
</html>
"""
