// Branches of a conversation. Its `messages` are a flat list in order of creation. Each has an `id`,
// and as `parent` the id of the message that it follows, or null. `leaf` is the id of the last message
// that is shown. Answers to one question, and versions of one question, have the same parent.

// Return the messages that are shown, from the first question to the leaf.
export function pathOf({ messages, leaf }) {
  const known = new Map(messages.map((message) => [message.id, message]));
  const path = [];
  for (let at = known.get(leaf); at; at = known.get(at.parent)) path.push(at);
  return path.reverse();
}

// Add a message after `parent` (a message or null), and show its branch.
export function add(conversation, message, parent) {
  message.id = 1 + conversation.messages.reduce((most, { id }) => Math.max(most, id), 0);
  message.parent = parent?.id ?? null;
  conversation.messages.push(message);
  conversation.leaf = message.id;
  return message;
}

// Return the message that `message` follows, or null.
export function parentOf({ messages }, message) {
  return messages.find(({ id }) => id === message.parent) ?? null;
}

// Return the message and its alternatives, oldest first.
export function versionsOf({ messages }, message) {
  return messages.filter(({ parent }) => parent === message.parent);
}

// Show the branch of `message`, down to the newest of the messages that follow it.
export function switchTo(conversation, message) {
  const newest = new Map(); // by parent: the last one remains
  for (const one of conversation.messages) newest.set(one.parent, one);
  let at = message;
  while (newest.has(at.id)) at = newest.get(at.id);
  conversation.leaf = at.id;
}

// Remove a message, unless others follow it.
export function removeLeaf(conversation, message) {
  if (conversation.messages.some(({ parent }) => parent === message.id)) return;
  conversation.messages = conversation.messages.filter((other) => other !== message);
  if (conversation.leaf === message.id) conversation.leaf = message.parent;
}

// Number the messages of a conversation that has no branches, as older versions of the page stored it.
export function grow(conversation) {
  if (conversation.messages.every(({ id }) => id === undefined)) {
    conversation.messages.forEach((message, i) => {
      message.id = i + 1;
      message.parent = i || null;
    });
    conversation.leaf = conversation.messages.length || null;
  }
  return conversation;
}

// Return an error message if `parent` and `leaf` do not make a tree, otherwise "". Each parent comes
// before its children, so there are no cycles; questions and answers alternate.
export function wrongTree({ messages, leaf }) {
  const roles = new Map([[null, "assistant"]]);
  for (const [i, { id, parent, role }] of messages.entries()) {
    if (!Number.isSafeInteger(id) || id < 1 || roles.has(id)) return `messages[${i}].id is not a new number`;
    if (!roles.has(parent)) return `messages[${i}].parent is not the id of an earlier message`;
    if (roles.get(parent) === role) return `messages[${i}] has the role of the message before it`;
    roles.set(id, role);
  }
  return roles.has(leaf) && (leaf !== null || !messages.length) ? "" : "leaf is not the id of a message";
}
