// Making and changing elements.

const SVG = "http://www.w3.org/2000/svg";

// h("a", { class: "x", href: "#" }, "text", child): false and null are left out of both lists.
function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== false));
  return element;
}

function byId(id) {
  return document.getElementById(id);
}

// Write only what is new: a browser lays out again what is written to, even with the same text.
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

// Make `parent` hold one element for each key, in order; those that were there before are kept,
// with the focus that they may have.
function keyed(parent, keys, make) {
  const kept = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const wanted = keys.map((key) => {
    const element = kept.get(String(key)) ?? make(key);
    element.dataset.key = key;
    return element;
  });
  for (const child of [...parent.children]) if (!wanted.includes(child)) child.remove();
  wanted.forEach((element, index) => {
    if (parent.children[index] !== element)
      parent.insertBefore(element, parent.children[index] ?? null);
  });
  return wanted;
}

export { byId, h, keyed, setAttribute, setText, svg };
