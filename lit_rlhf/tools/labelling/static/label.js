// Keys, the time on the page, and responses that scroll together. The page works without it.
"use strict";

const form = document.getElementById("label");
let seconds = 0;
let since = document.hidden ? null : performance.now();

function stopClock() {
  if (since !== null) seconds += (performance.now() - since) / 1000;
  since = null;
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) stopClock();
  else if (since === null) since = performance.now();
});

for (const each of document.forms) {
  each.addEventListener("submit", (event) => {
    if (each.dataset.sent) {
      event.preventDefault(); // a second key before the next page has come
      return;
    }
    each.dataset.sent = "yes";
    if (each === form) {
      stopClock();
      form.elements.seconds.value = seconds.toFixed(1);
    }
  });
}

// the browser shows an earlier page again, as it was left
window.addEventListener("pageshow", (event) => {
  if (event.persisted) location.reload();
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.repeat || event.isComposing) return;
  const remark = form && form.elements.remark;
  if (event.target.matches("textarea, input:not([type=radio])")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const key = event.key.toLowerCase();
  const button = document.querySelector(`[data-key="${CSS.escape(key)}"]`);
  const toggle = document.querySelector(`[data-toggle="${CSS.escape(key)}"]`);
  if (button) button.click();
  else if (toggle) toggle.checked = !toggle.checked;
  else if (key === "r" && remark) remark.focus();
  else return;
  event.preventDefault();
});

// a radio button that is chosen already is taken back by another click
for (const radio of document.querySelectorAll("[data-toggle]")) {
  let wasChecked = false;
  radio.parentElement.addEventListener("pointerdown", () => { wasChecked = radio.checked; });
  radio.addEventListener("click", (event) => {
    if (wasChecked && event.detail) radio.checked = false;
    wasChecked = false;
  });
}

const panes = [...document.querySelectorAll(".answer .text")];
let leader = null;
for (const pane of panes) {
  pane.addEventListener("scroll", () => {
    if (leader && leader !== pane) return; // it follows
    leader = pane;
    const room = pane.scrollHeight - pane.clientHeight;
    const share = room > 0 ? pane.scrollTop / room : 0;
    for (const other of panes) {
      if (other !== pane) other.scrollTop = share * (other.scrollHeight - other.clientHeight);
    }
    clearTimeout(pane.timer);
    pane.timer = setTimeout(() => { leader = null; }, 120);
  });
  if (pane.scrollHeight > pane.clientHeight) pane.tabIndex = 0; // arrow keys scroll it
}

const dialogue = document.querySelector(".dialogue");
if (dialogue) dialogue.scrollTop = dialogue.scrollHeight;

const guidelines = document.querySelector(".guidelines");
if (guidelines && matchMedia("(min-width: 1001px)").matches) guidelines.open = true;
