"use strict";

const TOKEN_KEY = "knnper-token";
// What each scope allows, in words.
const SCOPES = {
  predict: "predict",
  probabilities: "see probabilities",
  neighbors: "see why",
  read: "look at stored examples",
  add: "add examples",
  delete: "take examples back",
};
const byId = (id) => document.getElementById(id);
let info = null;
let current = null; // the last request: {type, content, input}
let pictures = []; // object URLs of neighbours' pictures, to be revoked
let lastNumber = 0; // of a request: a slow answer must not replace a newer one

class RequestFailed extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(method, path, type, content) {
  const headers = {};
  const token = sessionStorage.getItem(TOKEN_KEY);
  if (token) headers.Authorization = `Bearer ${token}`;
  if (type) headers["Content-Type"] = type;
  let answer;
  try {
    answer = await fetch(path, { method, headers, body: content });
  } catch {
    throw new RequestFailed(0, "The service cannot be reached.");
  }
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({ message: answer.statusText }));
  throw new RequestFailed(answer.status, problem.message);
}

const requestJson = async (...parts) => (await request(...parts)).json();

function element(name, text, className) {
  const created = document.createElement(name);
  if (text !== undefined) created.textContent = text;
  if (className) created.className = className;
  return created;
}

const may = (scope) => info.scopes.includes(scope);
const percent = (share) => `${(100 * share).toFixed(1)} %`;

function show(error) {
  byId("error").hidden = !error;
  byId("error").textContent = error ? error.message : "";
}

// Runs an action of the user, and shows its error.
async function attempt(work) {
  show(null);
  try {
    await work();
  } catch (error) {
    if (error.status === 401) askForToken();
    else show(error);
  }
}

// Shows no problem to a user without a token.
function askForToken() {
  const problem = byId("token-problem");
  problem.hidden = !sessionStorage.getItem(TOKEN_KEY);
  problem.textContent = "This token is not known: it was mistyped or revoked. Check it, " +
    "or ask for another one.";
  sessionStorage.removeItem(TOKEN_KEY);
  byId("token-form").hidden = false;
  for (const id of ["work", "allowed", "facts"]) byId(id).hidden = true;
  byId("status").textContent = "";
  byId("token").focus();
}

function showScopes() {
  const names = Object.keys(SCOPES);
  const allowed = names.filter(may), missing = names.filter((name) => !may(name));
  const text = `The token ${info.token} allows you to ` +
    `${allowed.map((name) => SCOPES[name]).join(", ") || "do nothing on this page"}. ` +
    `For more, ask for one with the scope it needs: to ` +
    `${missing.map((name) => `${SCOPES[name]} (${name})`).join(", ")}.`;
  byId("allowed").hidden = !missing.length && !sessionStorage.getItem(TOKEN_KEY);
  byId("allowed").firstElementChild.textContent = missing.length ? text : "";
  for (const part of document.querySelectorAll(".parts")) part.hidden = !may("neighbors");
  byId("bars").hidden = !may("probabilities");
  byId("work").hidden = !may("predict");
}

async function load() {
  info = await requestJson("GET", "info");
  byId("token-form").hidden = true;
  byId("facts").hidden = false;
  showScopes();
  byId("client").textContent = info.client;
  document.title = `${info.client} – knnper`;
  byId("status").textContent = "A global model and this client's own examples, mixed.";
  byId("model").textContent = `model ${info.model} · knnper ${info.version}`;
  byId("picture-input").hidden = !info.takes_pictures;
  byId("text-input").hidden = !info.takes_text;
  byId("feature-input").hidden = info.takes_pictures || info.takes_text;
  byId("feature-count").textContent = info.input_shape.join(" × ");
  byId("features").placeholder = info.feature_names.join(", ");
  byId("text-count").textContent = info.input_shape[0];
  byId("label").replaceChildren(
    ...info.class_names.map((name, number) => new Option(name, number)),
  );
  showFacts();
}

function showFacts() {
  const accuracy = info.accuracy ?? {};
  const on = accuracy.measured_on ? accuracy.measured_on.replaceAll("_", " ") : "";
  byId("measured").textContent = accuracy.num_examples
    ? `Accuracies on ${accuracy.num_examples} ${on} examples, when λ was chosen.`
    : "";
  const facts = [];
  if (info.store) {
    const room = info.store.capacity === null ? "" : ` of ${info.store.capacity}`;
    facts.push(["stored examples", `${info.store.num_stored}${room}`]);
  }
  if (may("neighbors")) {
    facts.push(["λ, weight of the neighbours", info.knn_weight.toFixed(2)],
      ["neighbours that vote", info.num_neighbors]);
  }
  for (const [name, key] of [["global model", "global_model"], ["neighbours", "knn"],
    ["mixed", "mixed"]]) {
    if (typeof accuracy[key] === "number") {
      facts.push([`accuracy, ${name}`, percent(accuracy[key])]);
    }
  }
  byId("facts").replaceChildren(...facts.map(([name, value]) => {
    const fact = element("div");
    fact.append(element("dt", name), element("dd", String(value)));
    return fact;
  }));
}

function bar(share, kind) {
  const cell = element("td");
  const row = element("div", undefined, "bar");
  const progress = element("progress", undefined, kind);
  progress.max = 1;
  progress.value = share ?? 0;
  progress.setAttribute("aria-hidden", "true");
  row.append(element("span", share === undefined ? "–" : percent(share)), progress);
  cell.append(row);
  return cell;
}

function showBars(prediction) {
  const rows = Object.entries(prediction.probabilities ?? {})
    .sort((one, other) => other[1] - one[1])
    .map(([name, share]) => {
      const row = element("tr", undefined, name === prediction.class_name ? "best" : "");
      const title = element("th", name);
      title.scope = "row";
      row.append(title, bar(share, "mixed"));
      if (prediction.global_probabilities) {
        row.append(bar(prediction.global_probabilities[name], "global"),
          bar(prediction.knn_probabilities?.[name], "knn"));
      }
      return row;
    });
  byId("bars").tBodies[0].replaceChildren(...rows);
}

async function neighborItem(neighbor) {
  const item = element("li");
  if (info.takes_pictures && may("read")) {
    const picture = element("img");
    picture.alt = `stored example ${neighbor.id}, ${neighbor.class_name}`;
    item.append(picture);
    try {
      const answer = await request("GET", `examples/${neighbor.id}/image`);
      picture.src = URL.createObjectURL(await answer.blob());
      pictures.push(picture.src);
    } catch (error) {
      picture.alt = `no picture: ${error.message}`;
    }
  }
  item.append(element("strong", neighbor.class_name),
    element("small", `distance ${neighbor.distance.toPrecision(3)}`),
    element("small", `vote ${percent(neighbor.weight)}`),
    element("small", neighbor.name ?? `example ${neighbor.id}`));
  return item;
}

async function showPrediction(answer, number) {
  const prediction = answer.predictions[0];
  byId("answer").textContent = prediction.class_name;
  const share = prediction.probabilities?.[prediction.class_name];
  const known = share === undefined ? [] : [percent(share)];
  if (answer.knn_weight !== undefined) known.push(`λ = ${answer.knn_weight.toFixed(2)}`);
  byId("confidence").textContent = known.join(", ");
  showBars(prediction);
  byId("result").hidden = false;
  byId("teach").hidden = !may("add");
  byId("label").value = String(prediction.label);
  const old = pictures;
  pictures = [];
  const items = await Promise.all((prediction.neighbors ?? []).map(neighborItem));
  if (number !== lastNumber) return;
  byId("neighbors").replaceChildren(...items);
  byId("why").hidden = items.length === 0;
  old.forEach((address) => URL.revokeObjectURL(address));
}

async function predict(sent) {
  const number = ++lastNumber;
  current = sent;
  byId("taught").textContent = "";
  const answer = await requestJson("POST", "predict", sent.type, sent.content);
  if (number === lastNumber) await showPrediction(answer, number);
}

function asBase64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new RequestFailed(0, "The file cannot be read."));
    reader.readAsDataURL(file);
  });
}

async function predictFile(file) {
  if (!["image/png", "image/jpeg"].includes(file.type)) {
    throw new RequestFailed(0, `Expected a PNG or JPEG image, found ${file.name}.`);
  }
  const preview = byId("preview");
  if (preview.src) URL.revokeObjectURL(preview.src);
  preview.src = URL.createObjectURL(file);
  preview.hidden = false;
  byId("drop-text").hidden = true;
  await predict({ type: file.type, content: file, input: { image: await asBase64(file) } });
}

async function predictFeatures() {
  const words = byId("features").value.split(/[\s,;]+/).filter(Boolean);
  const input = words.map(Number);
  const odd = words.find((_, place) => !Number.isFinite(input[place]));
  if (odd !== undefined) throw new RequestFailed(0, `Expected numbers, found “${odd}”.`);
  const content = JSON.stringify({ inputs: [input] });
  await predict({ type: "application/json", content, input });
}

async function predictText() {
  const input = { text: byId("text").value };
  const content = JSON.stringify({ inputs: [input] });
  await predict({ type: "application/json", content, input });
}

async function teach() {
  const label = Number(byId("label").value);
  const content = JSON.stringify({ examples: [{ input: current.input, label }] });
  const answer = await requestJson("POST", "examples", "application/json", content);
  const { id, kept } = answer.examples[0];
  const what = `${info.class_names[label]}, example ${id}`;
  if (kept && may("delete")) byId("remembered").append(rememberedItem(id, what));
  await load();
  await predict(current);
  byId("label").value = String(label);
  byId("taught").textContent = kept
    ? `Remembered as ${what}.`
    : "The store's policy did not keep it.";
}

function rememberedItem(id, what) {
  const item = element("li", `${what} `);
  const button = element("button", "Take it back", "quiet");
  button.type = "button";
  button.setAttribute("aria-label", `Take back ${what}`);
  button.addEventListener("click", () => attempt(() => takeBack(id, what, item)));
  item.append(button);
  return item;
}

async function takeBack(id, what, item) {
  const content = JSON.stringify({ ids: [id] });
  const answer = await requestJson("DELETE", "examples", "application/json", content);
  item.remove();
  await load();
  if (current) await predict(current);
  byId("taught").textContent = answer.deleted.length
    ? `Taken back: ${what}. ${answer.message ?? ""}`
    : `It was gone already: ${what}.`;
}

function onSubmit(id, work) {
  byId(id).addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(work);
  });
}

function takeFirst(files) {
  if (files.length && info?.takes_pictures) attempt(() => predictFile(files[0]));
}

onSubmit("token-form", async () => {
  sessionStorage.setItem(TOKEN_KEY, byId("token").value.trim());
  byId("token").value = "";
  await load();
  if (current && may("predict")) await predict(current);
});
byId("other-token").addEventListener("click", () => {
  sessionStorage.removeItem(TOKEN_KEY);
  askForToken();
});
onSubmit("feature-input", predictFeatures);
onSubmit("text-input", predictText);
onSubmit("teach", teach);
byId("file").addEventListener("change", (event) => takeFirst(event.target.files));
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    byId("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop") takeFirst(event.dataTransfer.files);
  });
}
document.addEventListener("paste", (event) => takeFirst(event.clipboardData.files));

attempt(load);
