// Entry point of the page: connects its parts, and handles buttons and keys.

import { Answer, continuationOf, messagesOf } from "./chat.js";
import { Composer } from "./composer.js";
import { showContext } from "./context.js";
import { Conversations } from "./conversations.js";
import { prepareKeyDialog } from "./dialogs.js";
import { byId } from "./element.js";
import { EnginePanel } from "./engine.js";
import { Exchange } from "./exchange.js";
import { Models } from "./models.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { onStorageTrouble } from "./storage.js";
import { toast } from "./toast.js";
import { add, parentOf, pathOf, removeLeaf, switchTo, versionsOf } from "./tree.js";
import { ConversationView } from "./view.js";

const SAVE_EVERY = 1000; // milliseconds, while an answer is streaming

onStorageTrouble(() => toast("This browser cannot store conversations: they are lost when the page closes."));
prepareKeyDialog();

const conversations = new Conversations();
const settings = new Settings();
new EnginePanel();
const running = new Map(); // the streaming answer of each conversation; several may run at once
const models = new Models(() => current && showState());
const composer = new Composer(send);
const view = new ConversationView({ ask: askAbout, edit, regenerate, proceed, step });
const sidebar = new Sidebar(
  conversations,
  { choose, removed },
  (conversation) => running.has(conversation),
);
let current = null;
new Exchange(conversations, () => sidebar.show());

// ---------------------------------------------------------------- asking

// Send a question as a new version of `edited`, or at the end. Return true if it was sent.
function send({ content, attachments }, edited) {
  if (running.has(current) || !isReady()) return false;
  const question = { role: "user", content, ...(attachments.length ? { attachments } : {}) };
  const parent = edited ? parentOf(current, edited) : (pathOf(current).at(-1) ?? null);
  if (!parent) conversations.nameAfter(current, content || attachments[0].name);
  answer(add(current, question, parent));
  return true;
}

function askAbout({ content }) {
  send({ content, attachments: [] }, null);
}

function isReady() {
  if (!models.name) models.load();
  return settings.check();
}

// Request an answer to a question of the current conversation.
function answer(question) {
  const messages = messagesOf(pathOf(current), settings.system);
  const message = { role: "assistant", content: "", thinking: "" };
  if (settings.schemaField.schema) message.format = "json";
  add(current, message, question);
  receive(message, { messages });
}

// Receive an answer, or the rest of one.
async function receive(message, fields) {
  const conversation = current;
  Object.assign(message, { state: "waiting", reason: null, error: null });
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
  view.update(message);
  showState();
  const streaming = { stream: true, stream_options: { include_usage: true } };
  const model = models.name ? { model: models.name } : {};
  await coming.run({ ...model, ...fields, ...streaming, ...settings.parameters() });
  running.delete(conversation);
  conversations.write(conversation);
  showState();
}

// Request another answer. The old one is kept, unless there is nothing in it.
function regenerate(message) {
  if (running.has(current) || !isReady()) return;
  const question = parentOf(current, message);
  if (!message.content && !message.thinking) removeLeaf(current, message);
  current.leaf = question.id;
  answer(question);
}

function proceed(message) {
  if (running.has(current) || !isReady()) return;
  const path = pathOf({ messages: current.messages, leaf: message.id });
  receive(message, continuationOf(path, settings.system));
}

function edit(message) {
  if (!running.has(current)) composer.edit(message);
}

// Show the version before (-1) or after (1) a message.
function step(message, by) {
  composer.stopEditing();
  const versions = versionsOf(current, message);
  const wanted = versions[versions.indexOf(message) + by];
  switchTo(current, wanted);
  conversations.write(current);
  view.showVersion(current, wanted, by);
  showState();
}

// ---------------------------------------------------------------- conversations

function choose(conversation) {
  composer.stopEditing();
  current = conversation;
  view.show(current);
  showState();
  closeDrawer();
  composer.focus();
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
  composer.showRunning(isRunning);
  showContext(pathOf(current), models.contextLength);
  byId("announcement").textContent = isRunning ? "The answer is coming." : "";
  sidebar.show(current);
}

// ---------------------------------------------------------------- buttons and keys

function closeDrawer() {
  document.body.classList.remove("drawer");
  byId("menu").setAttribute("aria-expanded", "false");
}

byId("stop").addEventListener("click", () => running.get(current)?.stop());
byId("drop-schema").addEventListener("click", () => {
  const dropped = settings.schemaField.clear();
  toast("Answers are free text again.", "Undo", () => settings.schemaField.set(dropped));
  composer.focus(); // the button with the focus was removed
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
    else composer.stopEditing();
  }
});
window.addEventListener("pagehide", () => {
  for (const conversation of running.keys()) conversations.write(conversation);
});

startNew();
models.load();
