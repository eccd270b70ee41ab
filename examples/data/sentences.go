package data

// sentences are what the notes of the orders are made of: several scripts, right
// to left, combining characters, emoji of several code points, what JSON, HTML
// and SQL have to escape.
var sentences = []string{
	"Please ring twice, the bell is quiet.",
	"Bitte beim Nachbarn abgeben, Schlüssel liegt unter der Fußmatte – danke schön!",
	"Merci de livrer après 18 h, l’ascenseur est hors service au n° 7.",
	"Dejar en recepción; ¿podrían llamar antes? Mañana no estaré.",
	"Proszę zostawić paczkę u sąsiada: żółte drzwi, trzecie piętro.",
	"Doručte prosím do přízemí, zvonek „Říha“.",
	"Kérem, csöngessen hosszan – öreg a ház, őrült a kutya.",
	"Παρακαλώ αφήστε το στο θυρωρείο, κλειστά μετά τις 20:00.",
	"Пожалуйста, позвоните за час до доставки: подъезд 3, код 45#.",
	"Будь ласка, не залишайте під дощем — всередині ноти й цукор.",
	"من فضلك اترك الطرد عند البواب، الطابق الثالث.",
	"נא להשאיר ליד הדלת, הכלב לא נושך.",
	"कृपया घंटी बजाने के बाद प्रतीक्षा करें, गेट धीरे खुलता है।",
	"অনুগ্রহ করে সন্ধ্যা ছয়টার পরে আসুন।",
	"กรุณาวางไว้หน้าบ้าน ระวังแมวหลุดออกมา",
	"置き配でお願いします。インターホンが壊れています。",
	"请放在门卫处，晚上七点以后在家。",
	"문 앞에 놓아 주세요. 초인종은 누르지 마세요!",
	"Để hàng ở quầy lễ tân giúp tôi, xin cảm ơn.",
	"Cafe\u0301 au rez-de-chausse\u0301e, demander Zoe\u0308.",
	"Happy birthday 🎂🎈 from all of us 👩‍👩‍👧‍👦 in 🇳🇿 — 👍🏽!",
	"Gift card text: \"To Ana & Bo <3\", 100% cotton, size 5'9\\\"",
	"Robert'); drop table orders; -- is really our company's name",
	"Tab\tand line\nbreak, zero\u200bwidth, no\u00a0break, line\u2028separator.",
}
