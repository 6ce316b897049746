// Browser storage of this page. It may be unavailable (private windows, settings) or full: then the
// page keeps its data only for as long as it is open.

let whenFull = () => {};

// Called once, when something could not be stored.
export function onStorageTrouble(callback) {
  whenFull = callback;
}

function attempt(action, otherwise) {
  try {
    return action();
  } catch {
    return otherwise;
  }
}

export function load(key) {
  return attempt(() => JSON.parse(localStorage.getItem(key)), null);
}

export function save(key, value) {
  const isKept = attempt(() => {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  }, false);
  if (!isKept) {
    whenFull();
    whenFull = () => {};
  }
  return isKept;
}

export function forget(key) {
  attempt(() => localStorage.removeItem(key));
}

export function keysWith(prefix) {
  return attempt(() => Object.keys(localStorage).filter((key) => key.startsWith(prefix)), []);
}

// The API key is deleted when the tab is closed.
const API_KEY = "nanoserve.api-key";
let keyInMemory = "";

export function apiKey() {
  return attempt(() => sessionStorage.getItem(API_KEY), null) ?? keyInMemory;
}

export function setApiKey(key) {
  keyInMemory = key;
  attempt(() => sessionStorage.setItem(API_KEY, key));
}
