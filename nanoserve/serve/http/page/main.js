// Entry point of the page: connects its parts, and handles buttons and keys.

import { ask } from "./api.js";
import { Answer, messagesOf } from "./chat.js";
import { Conversations } from "./conversations.js";
import { prepareKeyDialog } from "./dialogs.js";
import { byId, element, focusIfKeys, plural } from "./element.js";
import { EnginePanel } from "./engine.js";
import { Settings } from "./settings.js";
import { Sidebar, toast } from "./sidebar.js";
import { load, onStorageTrouble, save } from "./storage.js";
import { ConversationView } from "./view.js";

const SAVE_EVERY = 1000; // milliseconds, while an answer is streaming

onStorageTrouble(() => toast("This browser cannot store conversations: they are lost when the page closes."));
prepareKeyDialog();

const conversations = new Conversations();
const settings = new Settings();
new EnginePanel();
const running = new Map(); // the streaming answer of each conversation; several may run at once
const composer = byId("composer");
const input = composer.elements.question;
const view = new ConversationView({ ask: askAbout, edit, regenerate });
const sidebar = new Sidebar(
  conversations,
  { choose, removed },
  (conversation) => running.has(conversation),
);
let current = null;

// ---------------------------------------------------------------- asking

function askAbout(text) {
  const question = text.trim();
  if (!question || running.has(current) || !isReady()) return;
  current.messages.push({ role: "user", content: question });
  conversations.nameAfter(current, question);
  answer();
}

function isReady() {
  if (!byId("model").value) loadModels();
  return settings.check();
}

// Request an answer to the last message of the current conversation.
async function answer() {
  const conversation = current;
  const messages = messagesOf(conversation, settings.system);
  const message = { role: "assistant", content: "", thinking: "", state: "waiting" };
  if (settings.schemaField.schema) message.format = "json";
  conversation.messages.push(message);
  let saved = performance.now();
  const coming = new Answer(message, () => {
    if (conversation === current) view.update(message);
    if (performance.now() - saved < SAVE_EVERY) return;
    saved = performance.now();
    conversations.write(conversation);
  });
  running.set(conversation, coming);
  conversations.keep(conversation);
  view.show(conversation);
  showState();
  const streaming = { stream: true, stream_options: { include_usage: true } };
  const model = byId("model").value;
  await coming.run({ ...(model ? { model } : {}), messages, ...streaming, ...settings.parameters() });
  running.delete(conversation);
  conversations.write(conversation);
  showState();
}

function regenerate(message) {
  if (running.has(current) || !isReady()) return;
  current.messages.splice(current.messages.indexOf(message));
  answer();
}

// Copy the question to the input field. The messages after it are removed when the edited question is
// sent, and not before.
function edit(message) {
  if (running.has(current)) return;
  input.value = message.content;
  composer.dataset.editing = String(current.messages.indexOf(message));
  showState();
  fit();
  input.focus();
}

function stopEditing() {
  if (composer.dataset.editing === undefined) return;
  delete composer.dataset.editing;
  input.value = "";
  fit();
  showState();
}

function send() {
  const text = input.value;
  if (!text.trim() || running.has(current) || !isReady()) return;
  if (composer.dataset.editing !== undefined) current.messages.splice(Number(composer.dataset.editing));
  delete composer.dataset.editing;
  input.value = "";
  fit();
  askAbout(text);
}

// ---------------------------------------------------------------- conversations

function choose(conversation) {
  stopEditing();
  current = conversation;
  view.show(current);
  showState();
  closeDrawer();
  focusIfKeys(input);
}

function startNew() {
  const empty = conversations.all.find(({ messages }) => !messages.length);
  choose(empty ?? conversations.create());
}

function removed(conversation) {
  running.get(conversation)?.stop();
  if (conversation === current) startNew();
  else sidebar.show();
}

function showState() {
  const isRunning = running.has(current);
  composer.classList.toggle("running", isRunning);
  composer.classList.toggle("editing", composer.dataset.editing !== undefined);
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
  byId("send").disabled = !input.value.trim();
  byId("announcement").textContent = isRunning ? "The answer is coming." : "";
  sidebar.show(current);
}

// ---------------------------------------------------------------- models

async function loadModels() {
  try {
    const { data } = await (await ask("v1/models")).json();
    const wanted = byId("model").value || load("nanoserve.model");
    byId("model").replaceChildren(...data.map(({ id }) => element("option", { value: id }, id)));
    if (data.some(({ id }) => id === wanted)) byId("model").value = wanted;
    const length = data[0]?.max_model_len;
    byId("model").title = length ? `${plural(length, "token")} of context` : "The model";
    document.title = `${byId("model").value} · nanoserve`;
  } catch (error) {
    toast(error.message, "Try again", loadModels);
  }
}

byId("model").addEventListener("change", () => {
  save("nanoserve.model", byId("model").value);
  document.title = `${byId("model").value} · nanoserve`;
});

// ---------------------------------------------------------------- buttons and keys

// Make the field as high as its text, up to the maximum of the style sheet.
function fit() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  byId("send").disabled = !input.value.trim();
}

function closeDrawer() {
  document.body.classList.remove("drawer");
  byId("menu").setAttribute("aria-expanded", "false");
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
input.addEventListener("input", fit);
input.addEventListener("keydown", (event) => {
  // While a word is being composed, for example in Chinese, Enter selects it.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", () => running.get(current)?.stop());
byId("cancel-edit").addEventListener("click", stopEditing);
byId("drop-schema").addEventListener("click", () => {
  const dropped = settings.schemaField.clear();
  toast("Answers are free text again.", "Undo", () => settings.schemaField.set(dropped));
  focusIfKeys(input); // the button with the focus was removed
});
byId("new").addEventListener("click", startNew);
byId("new-small").addEventListener("click", startNew);
byId("menu").addEventListener("click", () => {
  const isOpen = document.body.classList.toggle("drawer");
  byId("menu").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) byId("new").focus();
});
byId("shade").addEventListener("click", closeDrawer);
for (const close of document.querySelectorAll("dialog .close")) {
  close.addEventListener("click", () => close.closest("dialog").close());
}
document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (event.key === "k" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    startNew();
  } else if (event.key === "Escape") {
    if (document.body.classList.contains("drawer")) closeDrawer();
    else if (running.has(current)) running.get(current).stop();
    else stopEditing();
  }
});
window.addEventListener("pagehide", () => {
  for (const conversation of running.keys()) conversations.write(conversation);
});

startNew();
loadModels();
