"use strict";
// Asks the questions of a training, one after the other. Texts enter by textContent only, never as markup.
const KEYS = {up: "u", down: "d", first: "1", second: "2", tie: "t", skip: "s", undo: "b", quit: "q"};
const LABELS = {up: "👍 good", down: "👎 not good", first: "the first is better", second: "the second is better", tie: "equally good", skip: "skip", undo: "back to the last one", quit: "quit"};
const $ = selector => document.querySelector(selector);
let question = {}, sending = false, timer = 0;
const UNREAD = 300;  // milliseconds in which nobody has read a question: a held key or a second click answers none

function make(tag, content = {}, ...children) {
  const element = Object.assign(document.createElement(tag), content);
  element.append(...children);
  return element;
}
function card(title, text, ...more) {
  return make("section", {className: "card"}, make("h2", {textContent: title}),
    make("p", {className: text ? "text" : "text empty", textContent: text || "(empty)"}), ...more);
}
function rating(place) {
  return make("fieldset", {}, make("legend", {textContent: "Your rating, if you like (keys 0 to 5 here; Esc leaves)"}), ...[0, 1, 2, 3, 4, 5].map(mark =>
    make("label", {}, make("input", {type: "radio", name: `rating${place}`, value: mark}), ` ${mark}`)));
}
function show() {
  const pair = question.scale === "pairs", answers = question.answers || [];
  $("main").hidden = !answers.length;
  $("#state").textContent = answers.length ? `${question.name}, question ${question.place} of ${question.total}` :
    `${question.name}: no question now. The training goes on; the next one appears here.`;
  document.title = answers.length ? `(${question.place}/${question.total}) Feedback` : "Feedback";
  if (!answers.length) return;
  $("#prompt").replaceChildren(...question.messages.map(([role, text]) => card(role, text)));
  $("#responses").replaceChildren(...question.responses.map((text, i) =>
    card(pair ? ["first response", "second response"][i] : "response", text, ...(pair ? [rating(i)] : []))));
  $("#wanted").textContent = question.wanted;
  $("#comment").value = $("#problem").textContent = "";
  $("#answers").replaceChildren(...answers.map(answer => {
    const button = make("button", {type: "button", className: answer in {skip: 1, undo: 1, quit: 1} ? "" : "answer"},
      LABELS[answer] || answer, " ", make("kbd", {textContent: KEYS[answer] || answer}));
    button.dataset.answer = answer;
    button.onclick = () => send(answer);
    return button;
  }));
  $("#answers").inert = true;
  clearTimeout(timer);
  timer = setTimeout(() => { $("#answers").inert = false; }, UNREAD);
}
function ask(path, options = {}) {
  return fetch(path + location.search + (options.query || ""), {cache: "no-store", ...options});
}
async function send(answer) {
  if (sending || $("#answers").inert || !(question.answers || []).includes(answer)) return;
  sending = true;
  const answered = question;
  const marks = question.scale === "pairs" ? [0, 1].map(i => $(`input[name=rating${i}]:checked`)).map(x => x ? Number(x.value) : null) : [];
  try {
    const reply = await ask("/answer", {method: "POST", body: JSON.stringify({number: answered.number, answer, ratings: marks, comment: $("#comment").value})});
    if (!reply.ok) $("#problem").textContent = (await reply.json()).error;
    else {
      if (question === answered) {  // else the next question came first, and stays
        question.answers = [];
        show();
      }
      if (answer === "quit") $("#state").textContent = "You have quit; all answers before are saved. You can close this page.";
    }
  } catch { $("#problem").textContent = "The answer was not sent: the training does not run any more."; }
  sending = false;
}
document.addEventListener("keydown", event => {
  const at = document.activeElement;
  if (event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") at.blur();
  if (at === $("#comment")) return;
  if (at.type === "radio" && "012345".includes(event.key)) { $(`input[name=${at.name}][value="${event.key}"]`).click(); return; }
  if (event.key === "c") { event.preventDefault(); $("#comment").focus(); return; }
  const answer = (question.answers || []).find(each => (KEYS[each] || each) === event.key.toLowerCase());
  if (answer && !$("main").hidden) { event.preventDefault(); send(answer); }
});
async function listen() {
  for (;;) {
    try {
      const reply = await ask("/question", {query: `&seen=${question.number ?? ""}`});
      const next = await reply.json();
      if (!reply.ok) { $("#state").textContent = next.error; return; }
      if (next.number !== question.number || !next.answers !== !question.answers) { question = next; show(); }
    } catch {
      $("main").hidden = true;
      $("#state").textContent = "Not connected: the training has ended, or begins again. Answers are saved; if the last one did not arrive, you will be asked again.";
      question = {};
      await new Promise(done => setTimeout(done, 2000));
    }
  }
}
listen();
